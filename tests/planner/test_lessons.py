"""What finished runs teach: later estimates on the same machine move towards what was measured, and no others do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_machine import made_up_machine, write_machine
from small_run import small_config

from meshwright import train
from meshwright.planner.calibration.calibration_log import CalibrationRecord, append_record, read_records
from meshwright.planner.calibration.corrections import UNCORRECTED, corrections_for
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.run_prediction import predict_run
from meshwright.planner.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.plan_to_config import best_plan
from meshwright.planner.search.search import search
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload import Workload


def job(cluster, *words, ranks=2):
    return PlannedJob.from_config(small_config(*words, ranks=ranks), cluster)


def teach(cluster, *ratios, words=(), memory=None):
    of = job(cluster, *words)
    seconds = estimate(of, lessons=UNCORRECTED).seconds
    for ratio in ratios:
        append_record(CalibrationRecord.from_job(of, (seconds, ratio * seconds), memory))


def test_runs_that_took_longer_make_the_next_estimate_longer(home):
    here = write_machine(home)
    before = estimate(job(here))
    teach(here, 1.5)
    after = estimate(job(here))
    assert after.seconds == pytest.approx(1.5 * before.seconds)
    assert sum(after.phases.values()) == after.seconds
    assert (after.interval_low, after.interval_high) == (
        pytest.approx(1.5 * before.interval_low),
        pytest.approx(1.5 * before.interval_high),
    )
    assert after.notes == ["corrected x1.5 by 1 run like it on this machine"]
    assert estimate(job(here), lessons=UNCORRECTED) == before


def test_runs_that_agree_narrow_the_interval_and_others_widen_it(home):
    here = write_machine(home)
    before = estimate(job(here))
    teach(here, *[1.2] * 6)
    agreed = estimate(job(here))
    assert agreed.interval_high / agreed.interval_low < before.interval_high / before.interval_low
    teach(here, 0.3, 4.0, 0.3, 4.0, 0.3, 4.0)
    apart = estimate(job(here))
    assert apart.interval_high / apart.interval_low > before.interval_high / before.interval_low


def test_memory_is_corrected_and_what_is_exact_of_it_is_not(home):
    here = write_machine(home)
    [before] = estimate(job(here)).memory_by_rank
    teach(here, 1.0, memory=(100.0, 125.0))
    [after] = estimate(job(here)).memory_by_rank
    assert after.tensors == pytest.approx(1.25 * before.tensors)
    assert after.optimizer == before.optimizer


def test_another_machine_learns_nothing_from_this_one(home):
    here = write_machine(home)
    teach(here, 3.0)
    other = made_up_machine(rate=30e9)
    assert corrections_for(other) is UNCORRECTED
    assert estimate(job(other)) == estimate(job(other), lessons=UNCORRECTED)
    other = write_machine(home, other)  # this one, measured anew
    assert estimate(job(other)).notes
    assert estimate(job(here)).notes == []


def test_plans_that_nobody_tried_are_corrected_as_well(home):
    """Else the search would run to whatever was never measured."""
    here = write_machine(home, made_up_machine(devices=64, memory=80e9))
    teach(here, 5.0)
    far = estimate(job(here, "--layout.tensor=2", "--layout.shard=parameters", "--batch.global=64", ranks=64))
    assert far.notes == ["corrected x5 by 1 run like it on this machine"]


def test_a_search_recalls_runs_once(home):
    """What is written while it goes on changes nothing."""
    here = write_machine(home)
    config = small_config()
    work = Workload(job(here).model, 16, 16, "fp32", config)
    desk, same = CostCache(work, here), CostCache(work, here)
    teach(here, 2.0)
    found = search(desk).ranked
    assert [one.notes for one in found] == [[]] * len(found)
    assert [Candidate.from_job(one.job) for one in search(same).ranked] == [
        Candidate.from_job(one.job) for one in found
    ]
    assert search(CostCache(work, here)).ranked[0].seconds > found[0].seconds


def test_a_layout_that_disappoints_makes_room_for_another(home, tmp_path):
    """Two plans that are predicted alike: the one that took ten times as long is not taken again."""
    here = write_machine(home)
    file = tmp_path / "run.toml"
    file.write_text("[model]\nwidth = 32\nlayers = 2\nffn = 48\n[data]\nsequence = 16\n")
    first = best_plan("here", file, [], None, None).config
    for _ in range(3):
        plain = estimate(PlannedJob.from_config(first, here), lessons=UNCORRECTED).seconds
        append_record(CalibrationRecord.from_job(PlannedJob.from_config(first, here), (plain, 10 * plain)))
    work = Workload(job(here).model, 16, 16, "fp32", first)
    for other in search(CostCache(work, here)).ranked:  # everything else was tried once, and is as predicted
        plain = estimate(other.job, lessons=UNCORRECTED).seconds
        if other.job.layout != PlannedJob.from_config(first, here).layout:
            append_record(CalibrationRecord.from_job(other.job, (plain, plain)))
    assert best_plan("here", file, [], None, None).config.layout != first.layout


def test_a_run_that_ends_well_teaches_once(home, tmp_path):
    write_machine(home)
    train(small_config(steps=13), run=tmp_path / "r", quiet=True)
    [record], damaged = read_records()
    assert damaged == 0
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert record.predicted_seconds == plan["uncorrected"]["seconds"] == plan["seconds"]
    assert record.predicted_memory == pytest.approx(record.measured_memory, rel=0.05)
    train(small_config(steps=13), run=tmp_path / "r", quiet=True)  # complete: no step was left
    train(small_config(steps=8), run=tmp_path / "short", quiet=True)
    assert len(read_records()[0]) == 1
    ratio = record.measured_seconds / record.predicted_seconds
    short = json.loads((tmp_path / "short" / "plan.json").read_text())
    assert short["seconds"] == pytest.approx(ratio * record.predicted_seconds)
    assert short["uncorrected"]["seconds"] == record.predicted_seconds
    assert short["notes"] == [f"corrected x{ratio:.3g} by 1 run like it on this machine"]


def test_a_run_on_a_named_machine_teaches_nothing(home, tmp_path):
    write_machine(home)
    train(small_config(steps=13), run=tmp_path / "r", cluster="h100:2", quiet=True)
    assert read_records() == ([], 0)
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["device"] == "h100"


@pytest.mark.parametrize(
    ("device", "word", "note"),
    [
        ("cpu", None, "this machine was never measured"),
        ("cpu", "h100:1", "2 ranks on 1 devices of h100:1"),
        ("NVIDIA H100 80GB HBM3", None, "this machine was never measured"),
        ("cpu", "nowhere", "no cluster 'nowhere'"),
    ],
)
def test_without_a_machine_bytes_are_predicted_and_seconds_are_not(device, word, note):
    tree = predict_run(small_config(), 1, device, word).record
    assert tree["notes"][0].find(note) >= 0
    assert tree["seconds"] is tree["phases"] is tree["cluster"] is None
    assert tree["memory"]["tensors"] > 0
    assert [row["axis"] for row in tree["communication_exact"]["0"]] == ["control", "replicate"]
    assert (tree["peak_flops"] is None) == (device == "cpu")
    json.dumps(tree, allow_nan=False)


def test_what_was_measured_of_another_device_says_nothing_of_this_one(home):
    write_machine(home)
    assert predict_run(small_config(), 1, "cpu").record["seconds"] > 0
    tree = predict_run(small_config(), 1, "NVIDIA H200").record
    assert tree["seconds"] is None
    assert tree["notes"] == ["what was measured of this machine is its made-up processor: no seconds are predicted"]


def test_an_error_in_the_prediction_is_noted_and_ends_nothing(home, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.planner.calibration.run_prediction.estimate", lambda *a, **k: 1 / 0)
    train(small_config(steps=1), run=tmp_path / "r", quiet=True)
    tree = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert tree == {"version": 1, "attempt": 1, "notes": ["nothing is predicted: ZeroDivisionError: division by zero"]}


def test_a_prediction_takes_no_time_that_a_start_would_show(home):
    from time import perf_counter

    write_machine(home)
    config = small_config("--layout.shard=parameters")
    took = []
    for _ in range(5):
        start = perf_counter()
        predict_run(config, 1, "cpu")
        took.append(perf_counter() - start)
    assert min(took) < 0.05  # the best of five: the machine may be busy
    assert resolve_cluster("here:2").device_count == 2
    assert replace(config) == config
