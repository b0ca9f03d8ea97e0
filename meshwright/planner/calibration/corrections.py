"""Estimates as finished runs on this machine correct them; torch-free.

Runs are recalled once, when a search begins: every plan of it is corrected by the same ones, whoever writes meanwhile.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

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
)
from meshwright.planner.cost.estimate import Estimate, MemoryEstimate
from meshwright.planner.cost.uncertainty import MIN_UNCERTAINTY
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.hardware.resolve_cluster import measured_machine
from meshwright.planner.workload.planned_job import PlannedJob

MOST_RECORDS = 128
"""Runs on a device that are asked: the newest, and of one shape no more than a correction is made of."""
TELLING = 3
"""Runs from which on their spread says more than the doubt about each part of a step."""


@dataclass(frozen=True)
class Corrections:
    """Measured runs, and what they make of estimates."""

    records: tuple[CalibrationRecord, ...] = ()
    damaged_lines: int = 0
    """lines of the file that could not be read, and were passed over"""
    factors: dict[tuple[JobSignature, str], CorrectionFactor] = field(default_factory=dict, compare=False, repr=False)
    comparable: dict[tuple[Any, ...], list[CalibrationRecord]] = field(default_factory=dict, compare=False, repr=False)

    def factor(self, job: PlannedJob, figure: str) -> CorrectionFactor:
        if not self.records:
            return CorrectionFactor()
        key = JobSignature.from_job(job), figure
        if key not in self.factors:
            self.factors[key] = correction_factor(key[0], self.comparable_records(key[0]), figure)
        return self.factors[key]

    def comparable_records(self, shape: JobSignature) -> list[CalibrationRecord]:
        """Looked for once: all plans of a search are of the same work."""
        if shape.workload_key not in self.comparable:
            self.comparable[shape.workload_key] = [
                record for record in self.records if shape.is_comparable(record.signature)
            ]
        return self.comparable[shape.workload_key]

    def correct_memory(self, job: PlannedJob, stages: list[MemoryEstimate]) -> list[MemoryEstimate]:
        """Parameters, gradients and the optimizer's state are exact: what differs is taken for activations."""
        ratio = self.factor(job, "memory").ratio
        return stages if ratio == 1 else [more_active(stage, (ratio - 1) * stage.tensors) for stage in stages]

    def correct_estimate(self, found: Estimate) -> Estimate:
        """Seconds by the runs' ratio. Their spread takes the place of the doubt, the more of them there are."""
        seconds, memory = (self.factor(found.job, figure) for figure in ("seconds", "memory"))
        if self.damaged_lines:
            lost = f"damaged lines of {calibration_file()}, passed over: {self.damaged_lines}"
            found = replace(found, notes=[*found.notes, lost])
        if not seconds.runs:
            return found
        total = found.seconds * seconds.ratio
        width = log(found.interval_high / found.interval_low) / 2
        if seconds.runs >= TELLING:
            width = max(
                MIN_UNCERTAINTY, (TELLING * width + seconds.runs * log(seconds.spread)) / (TELLING + seconds.runs)
            )
        middle = total * sqrt(found.interval_high * found.interval_low) / found.seconds
        held = f", memory x{memory.ratio:.3g}" if abs(memory.ratio - 1) >= 0.005 else ""
        runs = "1 run" if seconds.runs == 1 else f"{seconds.runs} runs"
        note = f"corrected x{seconds.ratio:.3g}{held} by {runs} like it on this machine"
        return replace(
            found,
            phases={phase: spent * seconds.ratio for phase, spent in found.phases.items()},
            calls=[
                replace(
                    call, seconds=call.seconds * seconds.ratio, exposed_seconds=call.exposed_seconds * seconds.ratio
                )
                for call in found.calls
            ],
            interval_low=middle * exp(-width),
            interval_high=middle * exp(width),
            notes=[*found.notes, note],
        )


UNCORRECTED = Corrections()


def more_active(stage: MemoryEstimate, more: float) -> MemoryEstimate:
    return replace(stage, activations=max(0.0, stage.activations + more))


def is_this_machine(cluster: Cluster) -> bool:
    """Whether it is this machine as it was measured, or a part of it."""
    if not cluster.device.measured_matmuls:
        return False
    try:
        here = measured_machine()
    except ConfigError:  # never measured, or nothing that can be read
        return False
    return (cluster.device, cluster.intra_node) == (here.device, here.intra_node)


def corrections_for(cluster: Cluster) -> Corrections:
    """What this machine has learned; of every other one nothing is known."""
    if not is_this_machine(cluster):
        return UNCORRECTED
    file = calibration_file()
    return Corrections(*newest(cluster.device.name, file, tuple(map(state, (file, rotated_file(file))))))


@lru_cache(maxsize=4)
def newest(device: str, file: Path, _states: tuple[tuple[int, int], ...]) -> tuple[tuple[CalibrationRecord, ...], int]:
    """And how many lines are damaged; read once for as long as the files stay as they are."""
    kept: list[CalibrationRecord] = []
    times: Counter[JobSignature] = Counter()
    found, damaged = read_records(file)
    for record in reversed(found):
        times[record.signature] += 1
        if (
            record.signature.device == device
            and times[record.signature] <= MAX_NEAREST_RECORDS
            and len(kept) < MOST_RECORDS
        ):
            kept.append(record)
    return tuple(reversed(kept)), damaged


def state(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
