"""Measuring this machine: what is found is a cluster that plans read back without torch. Times are not asserted."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from meshwright.cli import main
from meshwright.config.dtypes import COMPUTE_BYTES
from meshwright.errors import ConfigError
from meshwright.io import format_si
from meshwright.measure.collectives import COLLECTIVES, MESSAGE_BYTES, bus_factor
from meshwright.measure.kernels import MATMUL_SHAPES
from meshwright.measure.machine import MachineMeasurement, measure, measured_cluster
from meshwright.measure.timing import MAX_CALLS, MIN_BATCHES, TimeBudget, TimingGroup, fits_budget
from meshwright.observe.machine_text import show
from meshwright.planner.hardware.cluster import BandwidthCurve, MatmulRate
from meshwright.planner.hardware.cluster_file import read_cluster
from meshwright.planner.hardware.resolve_cluster import measurement_file, resolve_cluster, write_cluster

MESHWRIGHT = str(Path(sys.executable).with_name("meshwright"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One measurement, as short as can be, on three ranks: groups of two and of three."""
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {"MESHWRIGHT_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    words = [MESHWRIGHT, "plan", "measure", "--seconds", "1", "--ranks", "3", "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return home, json.loads(done.stdout)


def test_every_figure_of_a_measurement_is_there(measured):
    _, answer = measured
    assert (answer["name"], answer["per_node"], answer["nodes"]) == ("here", 3, 1)
    device, inside = answer["device"], answer["inside"]
    assert device["memory"] > 0
    assert device["stream"] > 0
    assert answer["measured"]["launch"] > 0
    shapes = {(row["precision"], row["rows"], row["inner"], row["columns"]) for row in device["products"]}
    assert shapes >= {(precision, *MATMUL_SHAPES["cpu"][0]) for precision in COMPUTE_BYTES}
    for precision in COMPUTE_BYTES:
        rates = [row["rate"] for row in device["products"] if row["precision"] == precision]
        assert device["peak"][precision] == max(rates) > 0
    assert [(row["collective"], row["ranks"]) for row in inside["curves"]] == [
        (collective, ranks) for ranks in (2, 3) for collective in COLLECTIVES
    ]
    for row in inside["curves"]:
        sizes = [size for size, _ in row["points"]]
        assert 2 <= len(sizes) <= len(MESSAGE_BYTES["cpu"])
        assert sizes == sorted(sizes)
        assert all(size % (4 * row["ranks"]) == 0 for size in sizes)
        assert all(rate > 0 for _, rate in row["points"])
    [whole] = [row for row in inside["curves"] if (row["collective"], row["ranks"]) == ("all_reduce", 3)]
    assert inside["curve"] == whole["points"]
    assert inside["bandwidth"] == max(rate for _, rate in whole["points"])
    assert inside["latency"] > 0


def test_a_measurement_is_read_back_as_here_without_torch(measured):
    home, answer = measured
    assert answer["file"] == str(home / "machine.toml")
    assert [path.name for path in home.iterdir()] == ["machine.toml"]
    code = (
        "import sys, json, dataclasses; from meshwright.planner.hardware.resolve_cluster import cluster_of\n"
        "print(json.dumps(dataclasses.asdict(cluster_of('here')))); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"MESHWRIGHT_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {"remarks": answer["remarks"], "file": answer["file"], **found} == answer


def test_a_measurement_is_shown_as_tables(measured):
    home, _ = measured
    said = io.StringIO()
    show(read_cluster(home / "machine.toml"), ["a remark"], home / "machine.toml", Console(file=said, width=120))
    text = said.getvalue()
    for word in ("3 x ", "128 x 128 x 128", "bf16", "all_reduce", "reduce_scatter", "a remark", "--cluster "):
        assert word in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "--seconds 0 is out of range; allowed: from 1 to 600"),
        (["--seconds", "nan"], "--seconds nan is out of range"),
        (["--ranks", "0"], "--ranks 0 is out of range; allowed: from 1 to"),
        (["--ranks", "1000"], "--ranks 1000 is out of range"),
        (["--out", "."], "cannot be written; allowed: a file in a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "measure", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_device_has_no_curves_and_is_a_cluster_all_the_same(tmp_path):
    seen = MachineMeasurement("a device", 8e9, [MatmulRate("fp32", 1, 2, 3, 123456.0)], 1.23456e9, 2e-6, [], True)
    cluster = measured_cluster(seen, 1)
    assert cluster.device.measured_matmuls[0].flops_per_second == 123500.0  # as many digits as a measurement has
    write_cluster(cluster, ["alone"], measurement_file(tmp_path / "one.toml"))
    assert read_cluster(tmp_path / "one.toml") == cluster


def test_a_hop_takes_what_the_smallest_all_reduce_took_divided_by_its_hops():
    seconds, ranks, size = 6e-6, 4, 1024.0
    rate = size * bus_factor("all_reduce", ranks) / seconds
    curves = [BandwidthCurve("all_reduce", ranks, ((size, rate), (2 * size, 3 * rate), (4 * size, 2 * rate)))]
    seen = MachineMeasurement("a device", 8e9, [MatmulRate("bf16", 1, 2, 3, 1.0)], 1e9, 2e-6, curves, False)
    link = measured_cluster(seen, ranks).intra_node
    assert link.latency == pytest.approx(seconds / (2 * (ranks - 1)), rel=1e-3)
    assert link.bandwidth == pytest.approx(3 * rate, rel=1e-3)  # a curve that falls again is left as it is
    assert [size for size, _ in link.bandwidth_curve] == [1024.0, 2048.0, 4096.0]


def test_a_call_is_timed_in_batches_and_few_times_if_it_is_slow(monkeypatch):
    crew, calls = TimingGroup(1, torch.device("cpu")), []
    now = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    assert crew.median_seconds(lambda: calls.append(1), share=0.1) == 1.0  # a clock that ticks once a call
    assert len(calls) == 2 + MIN_BATCHES
    monkeypatch.undo()
    calls.clear()
    assert 0 < crew.median_seconds(lambda: calls.append(1), share=0.01) < 1
    assert len(calls) > MIN_BATCHES * 10
    assert MAX_CALLS > 10


def test_what_takes_too_long_for_its_share_is_not_made():
    assert fits_budget(0.1, 1.0)
    assert not fits_budget(1.0, 1.0)


def test_what_one_thing_overdraws_the_next_ones_do_without(monkeypatch):
    now = iter([0.0, 1.0, 9.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    allowance = TimeBudget(TimingGroup(1, torch.device("cpu")), 10.0, 3)
    assert [allowance.next_share() for _ in range(3)] == [3.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("value", "said"), [(0.5, "0.5 "), (999.9, "1 k"), (1024, "1.02 k"), (6.67e13, "66.7 T"), (12.6e9, "12.6 G")]
)
def test_amounts_have_three_digits(value, said):
    assert format_si(value) == said


def test_here_is_refused_where_the_file_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    (tmp_path / "machine.toml").write_text("devices = 2\n[device")
    with pytest.raises(ConfigError, match=r"machine.toml is not TOML"):
        resolve_cluster("here")


def test_measure_refuses_before_it_starts_ranks():
    with pytest.raises(ConfigError, match="allowed: from 1 to 600"):
        measure(601)
