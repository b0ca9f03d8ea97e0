"""Calibration: what was measured corrects plans of similar runs, whoever else writes and whatever is torn."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from meshwright.config import config_from_dict
from meshwright.errors import ConfigError
from meshwright.planner.calibration import calibration_log
from meshwright.planner.calibration.calibration_log import (
    CalibrationRecord,
    CorrectionFactor,
    JobSignature,
    append_record,
    correction_factor,
    read_records,
)
from meshwright.planner.calibration.corrections import Corrections
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.hardware.cluster import preset_cluster
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT_COMPILED


def job(**model):
    return PlannedJob.from_config(config_from_dict({"model": model}), preset_cluster("h100", 8))


def record(ratio=2.0, memory=None, of=None):
    return CalibrationRecord.from_job(of or job(), (0.5, 0.5 * ratio), memory)


def correction(job, figure="seconds"):
    return correction_factor(JobSignature.from_job(job), read_records()[0], figure)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibration.jsonl"


def test_without_runs_nothing_is_corrected(file):
    assert correction(job()) == CorrectionFactor(1.0, 1.0, 0)


def test_the_correction_is_the_median_of_the_ratios_in_logarithms(file):
    for ratio in (1.0, 4.0, 2.0, 100.0, 0.5):
        append_record(record(ratio))
    found = correction(job())
    assert (found.ratio, found.n) == (pytest.approx(2.0), 5)
    assert found.spread == pytest.approx(4.0)  # four of the five lie within 2 / 4 and 2 * 4
    assert correction(job(), "memory").n == 0


def test_memory_is_corrected_by_itself(file):
    append_record(record(3.0, (10.0, 12.0)))
    assert correction(job(), "memory").ratio == pytest.approx(1.2)


def test_records_come_back_as_they_were_written(file):
    kept = [record(1.5), record(2.5, (1e9, 1.25e9), job(layers=7, experts=4))]
    for each in kept:
        append_record(each)
    assert read_records() == (kept, 0)


def test_the_nearest_runs_count_and_of_those_the_newest(file):
    near, far = JobSignature.from_job(job()), job(layers=32, width=512, heads=8)
    for ratio in range(1, 21):
        append_record(record(float(ratio)))
        append_record(record(1000.0, of=far))
    assert correction(job()).ratio == pytest.approx((16 * 17) ** 0.5)  # of 13 to 20
    assert near.distance(near) == 0
    assert near.distance(JobSignature.from_job(far)) > 0


@pytest.mark.parametrize(
    "other",
    [
        replace(job(), precision="bf16"),
        replace(job(), stack=MESHWRIGHT_COMPILED),
        replace(job(), cluster=preset_cluster("h200", 8)),
        job(layers=4000, width=8192, heads=64),
    ],
    ids=["precision", "software", "device", "size"],
)
def test_a_run_of_another_kind_says_nothing(file, other):
    append_record(record(9.0, of=other))
    assert correction(job()).n == 0
    assert correction(other).n == 1


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"null",
        b"[1]",
        b"{}",
        b"\xff\xff",
        b"[" * 5000,
        json.dumps(asdict(record()) | {"more": 1}).encode(),
        json.dumps(asdict(record()) | {"measured_seconds": "2"}).encode(),
        json.dumps(asdict(record()) | {"measured_seconds": -2.0}).encode(),
        json.dumps(asdict(record()) | {"measured_seconds": float("nan")}).encode(),
        json.dumps(asdict(record())).replace('"tensor": 1', '"tensor": 0').encode(),
        json.dumps(asdict(record())).encode()[:-20],
    ],
)
def test_a_damaged_line_is_passed_over_and_said(file, line):
    append_record(record(2.0))
    with open(file, "ab") as opened:
        opened.write(line)  # torn: no end
    append_record(record(2.0))
    found = correction(job())
    assert found.n == 2
    records, damaged = read_records()
    assert damaged == 1
    [note] = Corrections((), damaged).correct_estimate(estimate(job())).notes
    assert note == f"damaged lines of {file}, passed over: 1"
    assert len(records) == 2


def test_the_file_does_not_grow_without_bound(file, monkeypatch):
    monkeypatch.setattr(calibration_log, "LARGEST_FILE", 4000)
    for ratio in range(1, 41):
        append_record(record(float(ratio)))
    sizes = [path.stat().st_size for path in file.parent.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 4000
    found, damaged = read_records()
    assert damaged == 0
    assert found[-1].measured_seconds == 20.0
    assert len(found) > 8
    file.write_bytes(b"x" * 3_990 + b"\n" + file.read_bytes())  # larger than ours become: only its end is read
    assert read_records()[1] == 0


def test_a_record_that_is_too_long_is_refused(file):
    with pytest.raises(ConfigError, match="allowed: at most 4,096"):
        append_record(replace(record(), model="x" * 5000))
    assert not file.exists()


def write_many(number):
    for _ in range(50):
        append_record(record(float(number)))


def test_several_writers_at_once_lose_nothing(file):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(number,)) for number in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found, damaged = read_records()
    assert (len(found), damaged) == (150, 0)
    assert sorted({each.measured_seconds for each in found}) == [0.5, 1.0, 1.5]


def test_equally_far_runs_are_ordered_by_age_alone():
    records = [record(float(ratio)) for ratio in range(1, 10)]
    assert (
        correction_factor(JobSignature.from_job(job()), records, "seconds").runs == calibration_log.MAX_NEAREST_RECORDS
    )


def test_calibration_imports_no_torch():
    code = "import sys, meshwright.planner.calibration.calibration_log; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
