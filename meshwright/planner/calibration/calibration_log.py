"""Logs predicted and measured step time and memory of finished runs, and derives correction factors; torch-free.

The log is a JSON-lines file in $MESHWRIGHT_HOME. Predictions are logged before correction: otherwise corrections would
compound. A record is appended by one write, so that several runs can write at the same time. When the file reaches its
size limit, it replaces the rotated file, and a new one is started.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import exp, log, log2
from operator import sub
from pathlib import Path
from typing import Annotated, Any

from meshwright.base.config.constraints import Range
from meshwright.base.config.reader import build_dataclass
from meshwright.base.io import meshwright_home, open_descriptor, open_regular_file
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.workload.planned_job import PlannedJob

MAX_FILE_BYTES = 1 << 20
"""Size limit of the log; there are at most two files of this size."""
MAX_LINE_BYTES = 4096
"""Size limit of one record."""
MAX_HOST_LENGTH = 255
MAX_NEAREST_RECORDS = 8
"""Limit on the records that a correction factor is derived from."""
PRIOR_RUNS = 0.5
"""Number of runs that the cost model itself counts for: a factor is shrunk towards 1 as if so many more runs had
measured exactly what was predicted. One run removes two thirds of its own error, in logarithms, and eight 94 %."""
MAX_COMPARABLE_DOUBLINGS = 6.0
"""Two workloads are comparable if parameters, width and sequence length differ by at most this many doublings."""

Size = Annotated[int, Range(minimum=1, maximum=1 << 50)]
Seconds = Annotated[float, Range(above=0, maximum=1e9)]
Bytes = Annotated[float, Range(above=0, maximum=1e18)]


@dataclass(frozen=True)
class JobSignature:
    """What the step time and memory of a job depend on most; it finds similar jobs in the log."""

    device: str
    """name of the device"""
    trainer: str
    """name of the trainer profile"""
    precision: str
    """precision of matmuls"""
    activation_checkpoint: str
    """activation checkpointing mode"""
    sharding: str
    """what is sharded over data-parallel ranks"""
    active_parameters: Size
    """parameters that one token uses"""
    width: Size
    """hidden size"""
    sequence: Size
    """tokens per sample"""
    tokens_per_micro_batch: Size
    """tokens of one micro-batch on one rank"""
    layout: Layout
    """degrees of the mesh dimensions"""

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
        """Logarithms to base 2 of the sizes of the workload, then of the micro-batch and the layout."""
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
        """The fields that are the same for all candidates of a search."""
        return self.device, self.trainer, self.precision, self.active_parameters, self.width, self.sequence

    def is_comparable(self, other: JobSignature) -> bool:
        """Whether both have the same device, trainer and precision, and workloads of similar size."""
        if (self.device, self.trainer, self.precision) != (other.device, other.trainer, other.precision):
            return False
        doublings = float(sum(map(abs, map(sub, self.log2_sizes[:3], other.log2_sizes[:3]))))
        return doublings <= MAX_COMPARABLE_DOUBLINGS

    def distance(self, other: JobSignature) -> float:
        """Returns the difference of two jobs in doublings; another checkpointing mode or sharding counts as one."""
        modes = (self.activation_checkpoint != other.activation_checkpoint) + (self.sharding != other.sharding)
        return modes + float(sum(map(abs, map(sub, self.log2_sizes, other.log2_sizes))))


@dataclass(frozen=True)
class CalibrationRecord:
    """One finished run: predictions before correction, and measurements."""

    cluster: str
    """name of the cluster"""
    model: str
    """name of the model"""
    signature: JobSignature
    """what the run was"""
    predicted_seconds: Seconds
    """predicted step time"""
    measured_seconds: Seconds
    """median step time of the run"""
    predicted_memory: Bytes | None = None
    """predicted peak bytes of tensors on rank 0"""
    measured_memory: Bytes | None = None
    """measured peak bytes of tensors on rank 0"""
    host: str = ""
    """name of the host; runs of one host do not correct another one, even if both share a home folder"""

    @classmethod
    def from_job(
        cls, job: PlannedJob, seconds: tuple[float, float], memory: tuple[float, float] | None = None
    ) -> CalibrationRecord:
        """Returns the record of a job; `seconds` and `memory` are (predicted, measured)."""
        record = cls(job.cluster.name, job.model.name, JobSignature.from_job(job), *seconds, *(memory or (None, None)))
        return replace(record, host=this_host())

    def ratio(self, quantity: str) -> float | None:
        """Returns measured / predicted of a quantity, "seconds" or "memory"; None if it was not measured."""
        predicted, measured = getattr(self, f"predicted_{quantity}"), getattr(self, f"measured_{quantity}")
        return measured / predicted if predicted and measured else None


@dataclass(frozen=True)
class CorrectionFactor:
    """The factor that predictions are multiplied by."""

    ratio: float = 1.0
    """median of measured / predicted, shrunk towards 1 if there are few records"""
    spread: float = 1.0
    """measured / corrected is between 1 / spread and spread in 80 % of the records, by weight"""
    runs: int = 0
    """number of records; the spread of fewer than three means little"""


def this_host() -> str:
    """Returns the name of this host."""
    return socket.gethostname()[:MAX_HOST_LENGTH]


def calibration_file() -> Path:
    """Returns the path of the log."""
    return meshwright_home() / "calibration.jsonl"


def rotated_file(file: Path) -> Path:
    """Returns the path of the previous log, which a full one replaces."""
    return file.with_name(f"{file.stem}.old{file.suffix}")


def append_record(record: CalibrationRecord, file: Path | None = None) -> None:
    """Appends a record to the log."""
    path = file or calibration_file()
    line = json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(
            f"the calibration record has {len(line):,} bytes",
            f"expected at most {MAX_LINE_BYTES:,}: try shorter names of model and cluster",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # there is no log yet, or another process has just rotated it
        if path.stat().st_size + len(line) > MAX_FILE_BYTES:
            os.replace(path, rotated_file(path))
    try:
        descriptor = open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=True)
    except OSError as error:
        raise ConfigError(f"calibration log {path}: {error.strerror}", "expected a regular file") from None
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a process was killed while it wrote a line
        os.write(descriptor, b"\n" * torn + line)
    finally:
        os.close(descriptor)


def read_records(file: Path | None = None) -> tuple[list[CalibrationRecord], int]:
    """Returns the records of the log, the oldest first, and the number of damaged lines."""
    path = file or calibration_file()
    records: list[CalibrationRecord] = []
    damaged = 0
    for log_file in (rotated_file(path), path):
        for line in read_lines(log_file):
            try:
                records.append(parse_record(json.loads(line)))
            except (ValueError, RecursionError, TypeError, ConfigError):
                damaged += 1
    return records, damaged


def read_lines(path: Path) -> list[bytes]:
    """Reads at most the last MAX_FILE_BYTES of a log file; a missing or unreadable file has no lines."""
    try:
        with open_regular_file(path, follow=True) as file:
            start = max(0, os.fstat(file.fileno()).st_size - MAX_FILE_BYTES)
            file.seek(start)
            lines = file.read(MAX_FILE_BYTES).split(b"\n")
    except OSError:  # plans work without corrections
        return []
    return [line for line in (lines[1:] if start else lines) if line]


def parse_record(tree: Any) -> CalibrationRecord:
    """Validates one line of the log."""
    record: CalibrationRecord = build_dataclass(CalibrationRecord, tree, "")
    if not all(1 <= degree <= 1 << 24 for degree in asdict(record.signature.layout).values()):
        raise ConfigError("a degree of the layout is out of range", "expected at least 1")
    return record


def correction_factor(signature: JobSignature, records: Sequence[CalibrationRecord], quantity: str) -> CorrectionFactor:
    """Returns the weighted median of measured / predicted, in logarithms, over the nearest comparable records, shrunk
    towards 1 by PRIOR_RUNS.

    Among equally near records the newest count. The weight of a record halves with every doubling of distance. A factor
    exists for all candidates of a workload or for none, and is shrunk by the number of records, not by their distance:
    otherwise layouts that nobody tried would look best.
    """
    rated = []
    for age, record in enumerate(reversed(records)):
        ratio = record.ratio(quantity)
        if ratio and signature.is_comparable(record.signature):
            rated.append((signature.distance(record.signature), age, log(ratio)))
    if not rated:
        return CorrectionFactor()
    nearest = sorted(rated)[:MAX_NEAREST_RECORDS]
    weights = [2 ** (nearest[0][0] - distance) for distance, _, _ in nearest]
    ratios = [ratio for _, _, ratio in nearest]
    median = (quantile(ratios, weights, 0.5) - quantile([-ratio for ratio in ratios], weights, 0.5)) / 2
    correction = median * len(ratios) / (len(ratios) + PRIOR_RUNS)
    deviation = quantile([abs(ratio - correction) for ratio in ratios], weights, 0.8)
    return CorrectionFactor(exp(correction), exp(deviation), len(ratios))


def quantile(values: Sequence[float], weights: Sequence[float], fraction: float) -> float:
    """Returns the smallest value at which the cumulative weight reaches a fraction of the total weight."""
    remaining, result = fraction * sum(weights) * (1 - 1e-9), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        result, remaining = value, remaining - weight
        if remaining <= 0:
            break
    return result
