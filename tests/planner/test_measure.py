"""`plan measure`: the result is a cluster that plans read back without torch. Tests do not assert times."""

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

from meshwright.base.cli import main
from meshwright.base.hardware.cluster import BandwidthCurve, MatmulRate
from meshwright.base.hardware.cluster_file import read_cluster
from meshwright.base.hardware.resolve_cluster import measurement_file, resolve_cluster, write_cluster
from meshwright.base.io import format_si
from meshwright.errors import ConfigError
from meshwright.ops.measure.collectives import COLLECTIVES, MESSAGE_BYTES, bus_factor
from meshwright.ops.measure.kernels import MATMUL_SHAPES, TORCH_DTYPES
from meshwright.ops.measure.machine import MachineMeasurement, measure, measured_cluster
from meshwright.ops.measure.timing import MAX_CALLS, MIN_BATCHES, TimeBudget, TimingGroup, fits_budget
from meshwright.planner.display.machine_text import show_machine

MESHWRIGHT = str(Path(sys.executable).with_name("meshwright"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Runs one measurement, as short as possible, on three ranks: it has groups of two and of three ranks."""
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {"MESHWRIGHT_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    command = [MESHWRIGHT, "plan", "measure", "--seconds", "1", "--ranks", "3", "--json"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    return home, json.loads(process.stdout)


def test_measurement_has_matmuls_memory_launch_and_collectives(measured):
    _, answer = measured
    assert (answer["name"], answer["devices_per_node"], answer["nodes"]) == ("here", 3, 1)
    device, link = answer["device"], answer["intra_node"]
    assert device["memory"] > 0
    assert device["memory_bandwidth"] > 0
    assert answer["launch_seconds"] > 0
    shapes = {(row["precision"], row["m"], row["k"], row["n"]) for row in device["measured_matmuls"]}
    assert shapes >= {(precision, *MATMUL_SHAPES["cpu"][0]) for precision in TORCH_DTYPES}
    for precision in TORCH_DTYPES:
        rates = [row["flops_per_second"] for row in device["measured_matmuls"] if row["precision"] == precision]
        assert device["peak_flops"][precision] == max(rates) > 0
    assert [(row["collective"], row["ranks"]) for row in link["collective_curves"]] == [
        (collective, ranks) for ranks in (2, 3) for collective in COLLECTIVES
    ]
    for row in link["collective_curves"]:
        sizes = [size for size, _ in row["points"]]
        assert 2 <= len(sizes) <= len(MESSAGE_BYTES["cpu"])
        assert sizes == sorted(sizes)
        assert all(size % (4 * row["ranks"]) == 0 for size in sizes)
        assert all(rate > 0 for _, rate in row["points"])
    [curve] = [row for row in link["collective_curves"] if (row["collective"], row["ranks"]) == ("all_reduce", 3)]
    assert link["bandwidth_curve"] == curve["points"]
    assert link["bandwidth"] == max(rate for _, rate in curve["points"])
    assert link["latency"] > 0


def test_measurement_reads_back_as_cluster_here_without_torch(measured):
    home, answer = measured
    assert answer["file"] == str(home / "machine.toml")
    assert [path.name for path in home.iterdir()] == ["machine.toml"]
    code = (
        "import sys, json; from meshwright.base.hardware.cluster import cluster_json\n"
        "from meshwright.base.hardware.resolve_cluster import resolve_cluster\n"
        "print(json.dumps(cluster_json(resolve_cluster('here')))); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"MESHWRIGHT_HOME": str(home)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    cluster = json.loads(process.stdout)
    assert {"remarks": answer["remarks"], "file": answer["file"], **cluster} == answer


def shown(cluster, file, width):
    output = io.StringIO()
    show_machine(cluster, ["a remark"], file, Console(file=output, width=width))
    return output.getvalue()


def test_machine_view_shows_matmuls_and_collectives(measured):
    home, _ = measured
    text = shown(read_cluster(home / "machine.toml"), home / "machine.toml", 120)
    for word in ("3 x ", "128 x 128 x 128", "bf16", "all_reduce", "reduce_scatter", "a remark", "--cluster "):
        assert word in text


def test_machine_view_fits_eighty_columns():
    """The widest measurement: every precision, every collective, and a different message size per group size."""
    matmuls = [MatmulRate(precision, 16384, 4096, 14336, 123.4e12) for precision in (*TORCH_DTYPES, "fp8")]
    curves = [
        BandwidthCurve(name, ranks, tuple((size // 4 * 4.0 * ranks, 123.4e9) for size in MESSAGE_BYTES["cuda"]))
        for ranks in (2, 4, 6)
        for name in COLLECTIVES
    ]
    measurement = MachineMeasurement("NVIDIA H100 80GB HBM3", 85e9, matmuls, 3e12, 4e-6, curves, False)
    text = shown(measured_cluster(measurement, 6), Path("m.toml"), 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for heading in ("ranks", "message", *COLLECTIVES, "fp8"):
        assert heading in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seconds", "0"], "--seconds 0 is out of range; expected 1 to 600"),
        (["--seconds", "nan"], "--seconds nan is out of range"),
        (["--ranks", "0"], "--ranks 0 is out of range; expected 1 to"),
        (["--ranks", "1000"], "--ranks 1000 is out of range"),
        (["--out", "."], "cannot be written; expected a file in a folder that exists"),
    ],
)
def test_plan_measure_rejects_bad_arguments_before_measuring(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "measure", *args])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_single_device_is_a_cluster_without_collective_curves(tmp_path):
    matmuls = [MatmulRate("fp32", 1, 2, 3, 123456.0)]
    cluster = measured_cluster(MachineMeasurement("a device", 8e9, matmuls, 1.23456e9, 2e-6, [], True), 1)
    assert cluster.device.measured_matmuls[0].flops_per_second == 123500.0  # rounded to four digits
    write_cluster(cluster, ["one device"], measurement_file(tmp_path / "one.toml"))
    assert read_cluster(tmp_path / "one.toml") == cluster


def test_latency_is_one_hop_of_the_smallest_all_reduce():
    seconds, ranks, size = 6e-6, 4, 1024.0
    rate = size * bus_factor("all_reduce", ranks) / seconds
    curves = [BandwidthCurve("all_reduce", ranks, ((size, rate), (2 * size, 3 * rate), (4 * size, 2 * rate)))]
    matmuls = [MatmulRate("bf16", 1, 2, 3, 1.0)]
    measurement = MachineMeasurement("a device", 8e9, matmuls, 1e9, 2e-6, curves, False)
    link = measured_cluster(measurement, ranks).intra_node
    assert link.latency == pytest.approx(seconds / (2 * (ranks - 1)), rel=1e-3)
    assert link.bandwidth == pytest.approx(3 * rate, rel=1e-3)  # the curve is not smoothed
    assert [size for size, _ in link.bandwidth_curve] == [1024.0, 2048.0, 4096.0]


def test_slow_calls_are_timed_in_fewer_batches_than_fast_ones(monkeypatch):
    group, calls = TimingGroup(1, torch.device("cpu")), []
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))  # every call takes one second
    assert group.median_seconds(lambda: calls.append(1), share=0.1) == 1.0
    assert len(calls) == 2 + MIN_BATCHES
    monkeypatch.undo()
    calls.clear()
    assert 0 < group.median_seconds(lambda: calls.append(1), share=0.01) < 1
    assert len(calls) > MIN_BATCHES * 10
    assert MAX_CALLS > 10


def test_call_that_exceeds_its_share_of_the_budget_is_skipped():
    assert fits_budget(0.1, 1.0)
    assert not fits_budget(1.0, 1.0)


def test_time_budget_carries_over_between_measurements(monkeypatch):
    now = iter([0.0, 1.0, 9.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    budget = TimeBudget(TimingGroup(1, torch.device("cpu")), 10.0, 3)
    assert [budget.next_share() for _ in range(3)] == [3.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5 "), (999.9, "1 k"), (1024, "1.02 k"), (6.67e13, "66.7 T"), (12.6e9, "12.6 G")]
)
def test_rates_are_formatted_with_three_significant_digits(value, text):
    assert format_si(value) == text


def test_damaged_machine_file_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    (tmp_path / "machine.toml").write_text("devices_per_node = 2\n[device")
    with pytest.raises(ConfigError, match=r"machine.toml is not TOML"):
        resolve_cluster("here")


def test_measure_validates_seconds_before_it_starts_ranks():
    with pytest.raises(ConfigError, match="expected 1 to 600"):
        measure(601)
