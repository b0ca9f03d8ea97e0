"""Corrections: estimates on a measured machine move towards what its finished runs measured, and no others do."""

from __future__ import annotations

import json
from cProfile import Profile

import pytest

from meshwright import train
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.calibration.calibration_log import CalibrationRecord, append_record, read_records
from meshwright.planner.calibration.corrections import UNCORRECTED, corrections_for
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.own_runs import replay_own_runs
from meshwright.planner.calibration.prediction import prediction_record
from meshwright.planner.calibration.run_prediction import predict_run
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.plan_to_config import best_plan
from meshwright.planner.search.search import search
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload import Workload
from tests.kit.fake_machine import made_up_machine, write_machine
from tests.kit.small_run import small_config


def small_job(cluster, *overrides, ranks=2):
    return PlannedJob.from_config(small_config(*overrides, ranks=ranks), cluster)


def log_runs(cluster, *ratios, memory=None):
    """Logs runs whose measured step time is the predicted one times each ratio."""
    job = small_job(cluster)
    seconds = estimate(job, corrections=UNCORRECTED).seconds
    for ratio in ratios:
        append_record(CalibrationRecord.from_job(job, (seconds, ratio * seconds), memory))


def relative_width(result):
    return result.interval_high / result.interval_low


def test_slower_runs_make_the_next_estimate_longer(home):
    cluster = write_machine(home)
    before = estimate(small_job(cluster))
    log_runs(cluster, 1.5)
    after = estimate(small_job(cluster))
    factor = 1.5 ** (1 / 1.5)  # one run is shrunk towards 1, and the interval is as wide as before
    assert after.seconds == pytest.approx(factor * before.seconds)
    assert sum(after.phases.values()) == after.seconds
    assert after.interval_low == pytest.approx(factor * before.interval_low)
    assert after.interval_high == pytest.approx(factor * before.interval_high)
    assert after.notes == ["step time corrected x1.31 by 1 similar run on this machine"]
    assert estimate(small_job(cluster), corrections=UNCORRECTED) == before


def test_consistent_runs_narrow_the_interval_and_scattered_ones_widen_it(home):
    cluster = write_machine(home)
    before = estimate(small_job(cluster))
    log_runs(cluster, *[1.2] * 6)
    assert relative_width(estimate(small_job(cluster))) < relative_width(before)
    log_runs(cluster, 0.3, 4.0, 0.3, 4.0, 0.3, 4.0)
    assert relative_width(estimate(small_job(cluster))) > relative_width(before)


def test_memory_correction_changes_activations_only(home):
    cluster = write_machine(home)
    [before] = estimate(small_job(cluster)).memory_by_rank
    log_runs(cluster, 1.0, memory=(100.0, 125.0))
    [after] = estimate(small_job(cluster)).memory_by_rank
    assert after.tensors == pytest.approx(1.25 ** (1 / 1.5) * before.tensors)
    assert after.optimizer == before.optimizer


def test_record_states_factor_and_runs_of_every_corrected_figure(home):
    cluster = write_machine(home)
    assert prediction_record(estimate(small_job(cluster)))["corrections"] == []
    log_runs(cluster, 2.0, 2.0)
    log_runs(cluster, 2.0, memory=(100.0, 110.0))
    record = prediction_record(estimate(small_job(cluster)))
    seconds, memory = record["corrections"]
    assert (seconds["figure"], seconds["runs"], memory["figure"], memory["runs"]) == ("seconds", 3, "memory", 1)
    assert seconds["factor"] == pytest.approx(2 ** (3 / 3.5))
    assert memory["factor"] == pytest.approx(1.1 ** (1 / 1.5))
    expected = "step time corrected x1.81 by 3 similar runs on this machine, memory x1.07 by 1 similar run"
    assert record["notes"] == [expected]


def test_more_runs_move_the_estimate_further_and_narrow_the_interval(home):
    cluster = write_machine(home)
    results = [estimate(small_job(cluster))]
    for _ in range(8):
        log_runs(cluster, 1.4)
        results.append(estimate(small_job(cluster)))
    seconds = [result.seconds / results[0].seconds for result in results]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(1.4 ** (8 / 8.5))
    widths = [relative_width(result) for result in results]
    assert widths[:3] == pytest.approx([widths[0]] * 3)  # the spread of one or two runs means little
    assert widths[2:] == sorted(widths[2:], reverse=True)
    assert widths[-1] < widths[0]


def test_runs_of_another_host_do_not_correct(home, monkeypatch):
    """Several hosts may share a home folder."""
    cluster = write_machine(home)
    log_runs(cluster, 3.0)
    assert estimate(small_job(cluster)).notes
    monkeypatch.setattr("socket.gethostname", lambda: "another-host")
    assert estimate(small_job(cluster)) == estimate(small_job(cluster), corrections=UNCORRECTED)


def test_runs_of_this_machine_do_not_correct_another_one(home):
    cluster = write_machine(home)
    log_runs(cluster, 3.0)
    other = made_up_machine(rate=30e9)
    assert corrections_for(other) is UNCORRECTED
    assert estimate(small_job(other)) == estimate(small_job(other), corrections=UNCORRECTED)
    other = write_machine(home, other)  # this machine, measured again
    assert estimate(small_job(other)).notes
    assert estimate(small_job(cluster)).notes == []


def test_untried_layouts_are_corrected_as_well(home):
    """Otherwise the search would prefer whatever was never measured."""
    cluster = write_machine(home, made_up_machine(devices=64, memory=80e9))
    log_runs(cluster, 5.0)
    untried = estimate(
        small_job(cluster, "--layout.tensor=2", "--layout.shard=parameters", "--batch.global=64", ranks=64)
    )
    assert untried.notes == ["step time corrected x2.92 by 1 similar run on this machine"]


def test_search_reads_the_calibration_log_once(home):
    """A run that finishes during a search does not change it."""
    cluster = write_machine(home)
    work = Workload(small_job(cluster).model, 16, 16, "fp32", small_config())
    cache, same = CostCache(work, cluster), CostCache(work, cluster)
    log_runs(cluster, 2.0)
    plans = search(cache).ranked
    assert [plan.notes for plan in plans] == [[]] * len(plans)
    candidates = [Candidate.from_job(plan.job) for plan in plans]
    assert [Candidate.from_job(plan.job) for plan in search(same).ranked] == candidates
    assert search(CostCache(work, cluster)).ranked[0].seconds > plans[0].seconds


def test_layout_that_measured_slow_is_not_chosen_again(home, tmp_path):
    """Of two layouts with similar predictions, the one that took ten times as long loses."""
    cluster = write_machine(home)
    file = tmp_path / "run.toml"
    file.write_text("[model]\nwidth = 32\nlayers = 2\nffn = 48\n[data]\nsequence = 16\n")
    first = best_plan("here", file, [], None, None).config
    first_job = PlannedJob.from_config(first, cluster)
    for _ in range(3):
        seconds = estimate(first_job, corrections=UNCORRECTED).seconds
        append_record(CalibrationRecord.from_job(first_job, (seconds, 10 * seconds)))
    work = Workload(small_job(cluster).model, 16, 16, "fp32", first)
    for plan in search(CostCache(work, cluster)).ranked:  # all others were tried once, and took as long as predicted
        seconds = estimate(plan.job, corrections=UNCORRECTED).seconds
        if plan.job.layout != first_job.layout:
            append_record(CalibrationRecord.from_job(plan.job, (seconds, seconds)))
    assert best_plan("here", file, [], None, None).config.layout != first.layout


def test_finished_run_is_logged_once_and_corrects_the_next(home, tmp_path):
    write_machine(home)
    train(small_config(steps=13), run=tmp_path / "r", quiet=True)
    [record], damaged = read_records()
    assert damaged == 0
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert record.predicted_seconds == plan["uncorrected"]["seconds"] == plan["seconds"]
    assert record.predicted_memory == pytest.approx(record.measured_memory, rel=0.05)
    train(small_config(steps=13), run=tmp_path / "r", quiet=True)  # already complete: no step is left
    train(small_config(steps=8), run=tmp_path / "short", quiet=True)  # too short to measure
    assert len(read_records()[0]) == 1
    ratio = (record.measured_seconds / record.predicted_seconds) ** (1 / 1.5)
    short = json.loads((tmp_path / "short" / "plan.json").read_text())
    assert short["seconds"] == pytest.approx(ratio * record.predicted_seconds)
    assert short["uncorrected"]["seconds"] == record.predicted_seconds
    [note] = short["notes"]
    assert note.startswith(f"step time corrected x{ratio:.3g} by 1 similar run on this machine, memory x")
    assert [(row["figure"], row["runs"]) for row in short["corrections"]] == [("seconds", 1), ("memory", 1)]
    replayed = replay_own_runs(tmp_path)
    assert [run["id"] for run in replayed["records"]] == ["r"]
    assert replayed["records"][0]["seconds"]["factor"] == 1  # no other run corrects it
    assert [row["id"] for row in replayed["left_out"] if row["reason"].startswith("not finished")] == ["short"]


def test_run_with_a_named_cluster_is_not_logged(home, tmp_path):
    write_machine(home)
    train(small_config(steps=13), run=tmp_path / "r", cluster="h100:2", quiet=True)
    assert read_records() == ([], 0)
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["device"] == "h100"


@pytest.mark.parametrize(
    ("device", "cluster", "note"),
    [
        ("cpu", None, "this machine was never measured"),
        ("cpu", "h100:1", "2 ranks on 1 devices of h100:1"),
        ("NVIDIA H100 80GB HBM3", None, "this machine was never measured"),
        ("cpu", "nowhere", "cluster 'nowhere' is unknown"),
    ],
)
def test_bytes_are_predicted_without_a_known_machine(device, cluster, note):
    record = predict_run(small_config(), 1, device, cluster).record
    assert note in record["notes"][0]
    assert record["seconds"] is record["phases"] is record["cluster"] is None
    assert record["memory"]["tensors"] > 0
    assert [row["axis"] for row in record["communication_exact"]["0"]] == ["control", "replicate"]
    assert (record["peak_flops"] is None) == (device == "cpu")
    json.dumps(record, allow_nan=False)


def test_measurement_of_another_device_is_not_used(home):
    write_machine(home)
    assert predict_run(small_config(), 1, "cpu").record["seconds"] > 0
    record = predict_run(small_config(), 1, "NVIDIA H200").record
    assert record["seconds"] is None
    assert record["notes"] == ["step time is not predicted: the measured device of this machine is made-up processor"]


def test_error_in_the_prediction_does_not_stop_the_run(home, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.planner.calibration.run_prediction.estimate", lambda *_, **__: 1 / 0)
    train(small_config(steps=1), run=tmp_path / "r", quiet=True)
    record = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert record == {"version": 1, "attempt": 1, "notes": ["no prediction: ZeroDivisionError: division by zero"]}


def test_prediction_does_not_delay_the_start_of_a_run(home):
    """It takes as long as its calls; 33,000 take 40 ms on a slow core."""
    write_machine(home)
    config = small_config("--layout.shard=parameters")
    profile = Profile()
    profile.runcall(predict_run, config, 1, "cpu")
    assert sum(row.callcount for row in profile.getstats()) < 100_000
    assert resolve_cluster("here:2").device_count == 2
