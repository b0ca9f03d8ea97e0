"""Calibration log: measured runs correct predictions of similar runs, with concurrent writers and damaged lines."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from meshwright.base.config import config_from_dict
from meshwright.base.hardware.cluster import preset_cluster
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
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT


def make_job(**model):
    return PlannedJob.from_config(config_from_dict({"model": model}), preset_cluster("h100", 8))


def make_record(ratio=2.0, memory=None, job=None):
    return CalibrationRecord.from_job(job or make_job(), (0.5, 0.5 * ratio), memory)


def logged_factor(job, quantity="seconds"):
    return correction_factor(JobSignature.from_job(job), read_records()[0], quantity)


@pytest.fixture
def log_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibration.jsonl"


def test_correction_factor_is_one_without_runs(log_file):
    assert logged_factor(make_job()) == CorrectionFactor(1.0, 1.0, 0)


def test_correction_factor_is_the_median_of_ratios_in_logarithms(log_file):
    for ratio in (1.0, 4.0, 2.0, 100.0, 0.5):
        append_record(make_record(ratio))
    factor = logged_factor(make_job())
    assert (factor.ratio, factor.runs) == (pytest.approx(2.0 ** (5 / 5.5)), 5)
    assert factor.spread == pytest.approx(factor.ratio / 0.5)  # four of the five ratios are that near
    assert logged_factor(make_job(), "memory").runs == 0


def test_memory_has_its_own_correction_factor(log_file):
    append_record(make_record(3.0, (10.0, 12.0)))
    assert logged_factor(make_job(), "memory").ratio == pytest.approx(1.2 ** (1 / 1.5))


def test_records_read_back_equal(log_file):
    records = [make_record(1.5), make_record(2.5, (1e9, 1.25e9), make_job(layers=7, experts=4))]
    for record in records:
        append_record(record)
    assert read_records() == (records, 0)


def test_correction_factor_uses_the_nearest_and_newest_records(log_file):
    near, far = JobSignature.from_job(make_job()), make_job(layers=32, width=512, heads=8)
    for ratio in range(1, 21):
        append_record(make_record(float(ratio)))
        append_record(make_record(1000.0, job=far))
    assert logged_factor(make_job()).ratio == pytest.approx((16 * 17) ** (0.5 * 8 / 8.5))  # the median of 13 to 20
    assert near.distance(near) == 0
    assert near.distance(JobSignature.from_job(far)) > 0


@pytest.mark.parametrize(
    "other",
    [
        replace(make_job(), precision="fp32"),
        replace(make_job(), trainer=MESHWRIGHT),
        replace(make_job(), cluster=preset_cluster("h200", 8)),
        make_job(layers=4000, width=8192, heads=64),
    ],
    ids=["precision", "trainer", "device", "size"],
)
def test_records_of_incomparable_jobs_are_ignored(log_file, other):
    append_record(make_record(9.0, job=other))
    assert logged_factor(make_job()).runs == 0
    assert logged_factor(other).runs == 1


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"null",
        b"[1]",
        b"{}",
        b"\xff\xff",
        b"[" * 5000,
        json.dumps(asdict(make_record()) | {"more": 1}).encode(),
        json.dumps(asdict(make_record()) | {"measured_seconds": "2"}).encode(),
        json.dumps(asdict(make_record()) | {"measured_seconds": -2.0}).encode(),
        json.dumps(asdict(make_record()) | {"measured_seconds": float("nan")}).encode(),
        json.dumps(asdict(make_record())).replace('"tensor": 1', '"tensor": 0').encode(),
        json.dumps(asdict(make_record())).encode()[:-20],
    ],
)
def test_damaged_line_is_skipped_and_noted(log_file, line):
    append_record(make_record(2.0))
    with open(log_file, "ab") as file:
        file.write(line)  # torn: without a line end
    append_record(make_record(2.0))
    assert logged_factor(make_job()).runs == 2
    records, damaged = read_records()
    assert damaged == 1
    [note] = Corrections((), damaged).correct_estimate(estimate(make_job())).notes
    assert note == f"damaged lines of {log_file} that were ignored: 1"
    assert len(records) == 2


def test_log_size_is_bounded_by_rotation(log_file, monkeypatch):
    monkeypatch.setattr(calibration_log, "MAX_FILE_BYTES", 4000)
    for ratio in range(1, 41):
        append_record(make_record(float(ratio)))
    sizes = [path.stat().st_size for path in log_file.parent.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 4000
    records, damaged = read_records()
    assert damaged == 0
    assert records[-1].measured_seconds == 20.0
    assert len(records) > 8
    log_file.write_bytes(b"x" * 3_990 + b"\n" + log_file.read_bytes())  # beyond the limit: only its end is read
    assert read_records()[1] == 0


def test_record_that_is_too_long_is_rejected(log_file):
    with pytest.raises(ConfigError, match="expected at most 4,096"):
        append_record(replace(make_record(), model="x" * 5000))
    assert not log_file.exists()


def append_many(ratio):
    for _ in range(50):
        append_record(make_record(float(ratio)))


def test_concurrent_writers_lose_no_record(log_file):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(ratio,)) for ratio in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    records, damaged = read_records()
    assert (len(records), damaged) == (150, 0)
    assert sorted({record.measured_seconds for record in records}) == [0.5, 1.0, 1.5]


def test_correction_factor_uses_a_limited_number_of_records():
    records = [make_record(float(ratio)) for ratio in range(1, 10)]
    factor = correction_factor(JobSignature.from_job(make_job()), records, "seconds")
    assert factor.runs == calibration_log.MAX_NEAREST_RECORDS


def test_calibration_log_does_not_import_torch():
    code = "import sys, meshwright.planner.calibration.calibration_log; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
