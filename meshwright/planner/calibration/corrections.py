"""Corrects estimates by finished runs on this machine; torch-free.

A search reads the calibration log once, when it begins: all candidates are corrected by the same records, even if
another run finishes in the meantime.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from meshwright.base.hardware.cluster import Cluster
from meshwright.base.hardware.resolve_cluster import measured_machine
from meshwright.errors import ConfigError
from meshwright.planner.calibration.calibration_log import (
    MAX_NEAREST_RECORDS,
    CalibrationRecord,
    CorrectionFactor,
    JobSignature,
    calibration_file,
    correction_factor,
    read_records,
    rotated_file,
    this_host,
)
from meshwright.planner.cost.estimate import Estimate, MemoryEstimate
from meshwright.planner.cost.uncertainty import MIN_UNCERTAINTY
from meshwright.planner.workload.planned_job import PlannedJob

MAX_RECORDS = 128
"""Limit on the records of a device that are used: the newest, and at most MAX_NEAREST_RECORDS per signature."""
MIN_RUNS_FOR_SPREAD = 3
"""Number of runs from which on their spread replaces the cost model's uncertainty, with a weight that grows."""


@dataclass(frozen=True)
class Corrections:
    """Records of finished runs, and the corrections that follow from them."""

    records: tuple[CalibrationRecord, ...] = ()
    """records of this machine's device, the oldest first"""
    damaged_lines: int = 0
    """lines of the calibration log that could not be read"""
    factors: dict[tuple[JobSignature, str], CorrectionFactor] = field(default_factory=dict, compare=False, repr=False)
    """cache of correction factors"""
    comparable: dict[tuple[Any, ...], list[CalibrationRecord]] = field(default_factory=dict, compare=False, repr=False)
    """cache of comparable records by workload"""

    def factor(self, job: PlannedJob, quantity: str) -> CorrectionFactor:
        """Returns the factor for a quantity of a job, "seconds" or "memory"."""
        if not self.records:
            return CorrectionFactor()
        key = JobSignature.from_job(job), quantity
        if key not in self.factors:
            self.factors[key] = correction_factor(key[0], self.comparable_records(key[0]), quantity)
        return self.factors[key]

    def comparable_records(self, signature: JobSignature) -> list[CalibrationRecord]:
        """Returns the comparable records, found once per workload: all candidates of a search share it."""
        key = signature.workload_key
        if key not in self.comparable:
            self.comparable[key] = [record for record in self.records if signature.is_comparable(record.signature)]
        return self.comparable[key]

    def applied(self, job: PlannedJob) -> list[dict[str, Any]]:
        """Returns the figures of a job that are corrected, each with its factor, its spread and the number of runs."""
        factors = {quantity: self.factor(job, quantity) for quantity in ("seconds", "memory")}
        return [
            {"figure": quantity, "factor": factor.ratio, "spread": factor.spread, "runs": factor.runs}
            for quantity, factor in factors.items()
            if factor.runs
        ]

    def correct_memory(self, job: PlannedJob, memory_by_rank: list[MemoryEstimate]) -> list[MemoryEstimate]:
        """Corrects memory by changing activations: parameters, gradients and optimizer state are exact."""
        ratio = self.factor(job, "memory").ratio
        if ratio == 1:
            return memory_by_rank
        return [add_activations(memory, (ratio - 1) * memory.tensors) for memory in memory_by_rank]

    def correct_estimate(self, estimate: Estimate) -> Estimate:
        """Multiplies times by the runs' ratio; the more runs there are, the more their spread sets the interval."""
        seconds, memory = (self.factor(estimate.job, quantity) for quantity in ("seconds", "memory"))
        if self.damaged_lines:
            note = f"damaged lines of {calibration_file()} that were ignored: {self.damaged_lines}"
            estimate = replace(estimate, notes=[*estimate.notes, note])
        if not seconds.runs:
            return estimate
        low, high = estimate.interval_low, estimate.interval_high
        width = log(high / low) / 2
        if seconds.runs >= MIN_RUNS_FOR_SPREAD:
            weighted = MIN_RUNS_FOR_SPREAD * width + seconds.runs * log(seconds.spread)
            width = max(MIN_UNCERTAINTY, weighted / (MIN_RUNS_FOR_SPREAD + seconds.runs))
        center = estimate.seconds * seconds.ratio * sqrt(high * low) / estimate.seconds
        return replace(
            estimate,
            phases={phase: phase_seconds * seconds.ratio for phase, phase_seconds in estimate.phases.items()},
            calls=[
                replace(
                    call, seconds=call.seconds * seconds.ratio, exposed_seconds=call.exposed_seconds * seconds.ratio
                )
                for call in estimate.calls
            ],
            interval_low=center * exp(-width),
            interval_high=center * exp(width),
            notes=[*estimate.notes, correction_note(seconds, memory)],
        )


def correction_note(seconds: CorrectionFactor, memory: CorrectionFactor) -> str:
    """Says which figures are corrected, by which factor, and by how many runs."""
    note = f"step time corrected x{seconds.ratio:.3g} by {count_runs(seconds.runs)} on this machine"
    return f"{note}, memory x{memory.ratio:.3g} by {count_runs(memory.runs)}" if memory.runs else note


def count_runs(runs: int) -> str:
    return "1 similar run" if runs == 1 else f"{runs} similar runs"


UNCORRECTED = Corrections()
"""No corrections."""


def add_activations(memory: MemoryEstimate, extra_bytes: float) -> MemoryEstimate:
    return replace(memory, activations=max(0.0, memory.activations + extra_bytes))


def is_this_machine(cluster: Cluster) -> bool:
    """Whether the cluster is this machine as measured, or a part of it."""
    if not cluster.device.measured_matmuls:
        return False
    try:
        machine = measured_machine()
    except ConfigError:  # it was never measured, or its file is damaged
        return False
    return (cluster.device, cluster.intra_node) == (machine.device, machine.intra_node)


def corrections_for(cluster: Cluster) -> Corrections:
    """Returns the corrections of this machine if the cluster is this machine, else none."""
    if not is_this_machine(cluster):
        return UNCORRECTED
    file = calibration_file()
    versions = tuple(map(file_version, (file, rotated_file(file))))
    return Corrections(*newest_records(cluster.device.name, this_host(), file, versions))


@lru_cache(maxsize=4)
def newest_records(
    device: str, host: str, file: Path, _versions: tuple[tuple[int, int], ...]
) -> tuple[tuple[CalibrationRecord, ...], int]:
    """Returns the newest records of a host's device and the number of damaged lines; cached while no file changes."""
    newest: list[CalibrationRecord] = []
    repeats: Counter[JobSignature] = Counter()
    records, damaged = read_records(file)
    for record in reversed(records):
        if record.host != host:
            continue
        repeats[record.signature] += 1
        if (
            record.signature.device == device
            and repeats[record.signature] <= MAX_NEAREST_RECORDS
            and len(newest) < MAX_RECORDS
        ):
            newest.append(record)
    return tuple(reversed(newest)), damaged


def file_version(file: Path) -> tuple[int, int]:
    """Returns modification time and size, which change when a file is written."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
