"""What finished runs on this machine teach later plans: measured figures beside the predicted ones, kept as JSON lines;
torch-free.

Predictions are kept as they were before any correction: else corrections would chase themselves. A line is one write to
the end of the file, so that several runs may write at once. A file that has grown to its limit makes room by becoming
the old one, in place of the one before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import exp, log, log2
from operator import sub
from pathlib import Path
from typing import Annotated, Any

from meshwright.config.constraints import Range
from meshwright.config.reader import build_dataclass
from meshwright.errors import ConfigError
from meshwright.io import open_regular_file
from meshwright.planner.hardware.resolve_cluster import meshwright_home
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.layout import Layout

MAX_FILE_BYTES = 1 << 20
LONGEST_LINE = 4096
MAX_NEAREST_RECORDS = 8
"""Records that a correction is made of, at most."""
FAR = 6.0
"""Doublings between two models and their sequences from which on a run of one says nothing of the other."""

Size = Annotated[int, Range(minimum=1, maximum=1 << 50)]
Seconds = Annotated[float, Range(above=0, maximum=1e9)]
Bytes = Annotated[float, Range(above=0, maximum=1e18)]


@dataclass(frozen=True)
class JobSignature:
    """What the time and memory of a job depend on most."""

    device: str
    trainer: str
    precision: str
    activation_checkpoint: str
    sharding: str
    active_parameters: Size
    """that a token meets"""
    width: Size
    sequence: Size
    tokens_per_micro_batch: Size
    """of one rank in one micro-step"""
    layout: Layout

    @classmethod
    def from_job(cls, job: PlannedJob) -> JobSignature:
        return cls(
            job.cluster.device.name,
            job.trainer.name,
            job.precision,
            job.activation_checkpoint,
            job.sharding,
            job.model.active_parameters,
            job.model.width,
            job.sequence,
            job.tokens_per_micro_batch,
            job.layout,
        )

    @cached_property
    def log2_sizes(self) -> tuple[float, ...]:
        """In doublings: of the work, then of how it is spread."""
        layout = self.layout
        return tuple(
            log2(size)
            for size in (
                self.active_parameters,
                self.width,
                self.sequence,
                self.tokens_per_micro_batch,
                *layout.degrees,
                layout.expert,
            )
        )

    @property
    def workload_key(self) -> tuple[str, str, str, int, int, int]:
        """What no plan changes."""
        return self.device, self.trainer, self.precision, self.active_parameters, self.width, self.sequence

    def is_comparable(self, other: JobSignature) -> bool:
        """Another device, precision or software is another matter altogether, and so is work of quite another size."""
        if (self.device, self.trainer, self.precision) != (other.device, other.trainer, other.precision):
            return False
        return float(sum(map(abs, map(sub, self.log2_sizes[:3], other.log2_sizes[:3])))) <= FAR

    def distance(self, other: JobSignature) -> float:
        """In doublings of what differs."""
        kinds = (self.activation_checkpoint != other.activation_checkpoint) + (self.sharding != other.sharding)
        return kinds + float(sum(map(abs, map(sub, self.log2_sizes, other.log2_sizes))))


@dataclass(frozen=True)
class CalibrationRecord:
    cluster: str
    model: str
    signature: JobSignature
    predicted_seconds: Seconds
    measured_seconds: Seconds
    """of a step, the median of the run"""
    predicted_memory: Bytes | None = None
    measured_memory: Bytes | None = None

    @classmethod
    def from_job(
        cls, job: PlannedJob, seconds: tuple[float, float], memory: tuple[float, float] | None = None
    ) -> CalibrationRecord:
        """Both as (predicted, measured)."""
        return cls(job.cluster.name, job.model.name, JobSignature.from_job(job), *seconds, *(memory or (None, None)))

    def ratio(self, figure: str) -> float | None:
        """Measured / predicted."""
        predicted, measured = getattr(self, f"predicted_{figure}"), getattr(self, f"measured_{figure}")
        return measured / predicted if predicted and measured else None


@dataclass(frozen=True)
class CorrectionFactor:
    """By what predictions are multiplied."""

    ratio: float = 1.0
    spread: float = 1.0
    """measured / corrected lay between 1 / spread and spread in four of five of the records"""
    runs: int = 0
    """records that it is made of; fewer than three say little of the spread"""


def calibration_file() -> Path:
    return meshwright_home() / "calibration.jsonl"


def rotated_file(file: Path) -> Path:
    return file.with_name(f"{file.stem}.old{file.suffix}")


def append_record(record: CalibrationRecord, file: Path | None = None) -> None:
    path = file or calibration_file()
    line = json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n"
    if len(line) > LONGEST_LINE:
        raise ConfigError(f"a record of {len(line):,} bytes", f"allowed: at most {LONGEST_LINE:,}; give shorter names")
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # it is the first, or another writer has just made room
        if path.stat().st_size + len(line) > MAX_FILE_BYTES:
            os.replace(path, rotated_file(path))
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no plain file", "allowed: a file")
    opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(opened).st_size
        torn = size > 0 and os.pread(opened, 1, size - 1) != b"\n"  # a writer was killed in the middle of its line
        os.write(opened, b"\n" * torn + line)
    finally:
        os.close(opened)


def read_records(file: Path | None = None) -> tuple[list[CalibrationRecord], int]:
    """Every record, the oldest first, and how many lines are none."""
    path = file or calibration_file()
    found: list[CalibrationRecord] = []
    damaged = 0
    for each in (rotated_file(path), path):
        for line in lines_of(each):
            try:
                found.append(read_record(json.loads(line)))
            except (ValueError, RecursionError, TypeError, ConfigError):
                damaged += 1
    return found, damaged


def lines_of(path: Path) -> list[bytes]:
    """The last ones of a file that is larger than ours become."""
    try:
        with open_regular_file(path) as file:
            start = max(0, os.fstat(file.fileno()).st_size - MAX_FILE_BYTES)
            file.seek(start)
            lines = file.read(MAX_FILE_BYTES).split(b"\n")
    except OSError:  # there is none, or it is no file: corrections are a gain, not a need
        return []
    return [line for line in (lines[1:] if start else lines) if line]


def read_record(tree: Any) -> CalibrationRecord:
    record: CalibrationRecord = build_dataclass(CalibrationRecord, tree, "")
    if not all(1 <= degree <= 1 << 24 for degree in asdict(record.signature.layout).values()):
        raise ConfigError("a degree of a layout is out of range", "allowed: from 1 on")
    return record


def correction_factor(shape: JobSignature, records: Sequence[CalibrationRecord], figure: str) -> CorrectionFactor:
    """The median, in logarithms, of measured / predicted over the nearest records; of equally near ones the newest. One
    that is a doubling further off counts half.

    All plans of one workload have a correction, or none has: else those that nobody tried would look the best.
    """
    rated = []
    for age, record in enumerate(reversed(records)):
        ratio = record.ratio(figure)
        if ratio and shape.is_comparable(record.signature):
            rated.append((shape.distance(record.signature), age, log(ratio)))
    if not rated:
        return CorrectionFactor()
    nearest = sorted(rated)[:MAX_NEAREST_RECORDS]
    weights = [2 ** (nearest[0][0] - distance) for distance, _, _ in nearest]
    ratios = [ratio for _, _, ratio in nearest]
    middle = (quantile(ratios, weights, 0.5) - quantile([-ratio for ratio in ratios], weights, 0.5)) / 2
    away = quantile([abs(ratio - middle) for ratio in ratios], weights, 0.8)
    return CorrectionFactor(exp(middle), exp(away), len(ratios))


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The smallest value up to which this share of the weight lies."""
    until, found = share * sum(weights) * (1 - 1e-9), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        found, until = value, until - weight
        if until <= 0:
            break
    return found
