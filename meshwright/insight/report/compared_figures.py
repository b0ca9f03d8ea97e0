"""Every measured figure of a run next to its prediction. Torch-free.

| measured phase | predicted phases |
|---|---|
| forward + backward | forward, backward, recompute, contention, and communication exposed inside them |
| waits in forward and backward | communication exposed inside them |
| sync | with a pipeline: bubble and pipeline; with DDP: replicate |
| update | update |
| fetch + copy | other |

The error is predicted / measured - 1: it is negative if the prediction was too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.records.memory_classes import COMPARED_CLASSES
from meshwright.base.records.untrusted_records import RecordedCounters, bounded_object, byte_counts, finite_number
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_ddp

NEWEST_STEPS = 2048
"""The newest steps of an attempt over which medians are taken."""
MAX_PIPELINE_ROWS = 16
"""The ranks of a pipeline whose micro-batches in flight are shown if they equal the prediction."""
UNITS = ("tokens", "samples", "targets")
"""What a run may call its targets."""


@dataclass(frozen=True)
class ReportRow:
    section: str
    figure: str
    unit: str
    """s, B, /s, share or count."""
    measured: float | None
    predicted: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


@dataclass(frozen=True)
class Measurements:
    """What the ranks of one attempt measured."""

    steps: dict[int, StepTable]
    """the timed steps of every rank: without counters or profiler, and without the first two"""
    counters: dict[int, RecordedCounters]
    """the newest counters of every rank that has some"""

    @classmethod
    def of_attempt(cls, history: RunHistory, attempt: int, ranks: int) -> Measurements:
        """The measurements of an attempt on so many ranks."""
        present = [rank for rank in history.ranks if rank < max(1, ranks)]
        return cls(
            {rank: timed_steps(history, rank, attempt) for rank in present},
            {rank: history.counters[rank] for rank in present if counted_in(history, rank, attempt)},
        )


def counted_in(history: RunHistory, rank: int, attempt: int) -> bool:
    return rank in history.counters and history.counters[rank].attempt == attempt


def timed_steps(history: RunHistory, rank: int, attempt: int) -> StepTable:
    """The newest steps of an attempt whose duration is typical."""
    return history.steps(rank).of_attempt(attempt).timed().select(slice(-NEWEST_STEPS, None))


def median_of(values: NDArray[np.float64]) -> float | None:
    """The median of the values that were recorded."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def mean_of(values: NDArray[np.float64]) -> float | None:
    """The mean of the values that were recorded. Means of parts add up to the mean of the whole, medians do not."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else None


def sum_of(table: StepTable, columns: Iterable[str]) -> NDArray[np.float64]:
    """The sum of columns per step; a value that was not recorded counts as 0."""
    total: NDArray[np.float64] = np.sum([np.nan_to_num(table.column(name)) for name in columns], axis=0)
    return total


def step_rows(steps: StepTable, plan: Mapping[str, Any], unit: Any = None) -> list[ReportRow]:
    """The time of a step. `unit` is what the run calls a target; a plan predicts tokens."""
    seconds = median_of(steps.seconds)
    flops, peak = finite_number(plan.get("flops")), finite_number(plan.get("peak_flops"))
    mfu = flops / seconds / peak if seconds and flops and peak else None
    rate_name = f"{unit}/s" if unit in UNITS else "tokens/s"
    no_step = "" if len(steps) else "no timed step yet"
    no_peak = "" if peak or not plan.get("plan") else "the device's peak FLOP/s is unknown"
    return [
        ReportRow("step", "step time", "s", seconds, finite_number(plan.get("seconds")), no_step),
        ReportRow(
            "step",
            rate_name,
            "/s",
            median_of(np.nan_to_num(steps.tokens) / steps.seconds),
            finite_number(plan.get("tokens_per_second")),
        ),
        ReportRow("step", "MFU", "share", mfu, finite_number(plan.get("mfu")), no_peak),
        ReportRow(
            "step",
            "exposed communication",
            "s",
            median_of(steps.exposed),
            finite_number(plan.get("exposed_seconds")),
            f"measured by {steps.exposed_source}" if len(steps) else "",
        ),
    ]


def phase_rows(steps: StepTable, plan: Mapping[str, Any], layout: Layout | None) -> list[ReportRow]:
    """Compares phases as the table of this module maps them."""
    predicted = {
        phase: value
        for phase, item in bounded_object(plan.get("phases")).items()
        if (value := finite_number(item)) is not None
    }
    sync_phases = {"bubble", "pipeline"} | ({"replicate"} if layout is not None and uses_ddp(layout) else set())
    compute_phases = [phase for phase in predicted if phase not in sync_phases | {"update", "other"}]

    def row(name: str, measured_columns: tuple[str, ...], predicted_phases: Iterable[str]) -> ReportRow:
        measured = median_of(sum_of(steps, measured_columns))
        names = [phase for phase in predicted_phases if phase in predicted]
        total = sum(predicted[phase] for phase in names) if predicted else None
        return ReportRow("phases", name, "s", measured, total, ", ".join(names) if len(names) > 1 else "")

    rows = [row("forward + backward", ("phases.forward", "phases.backward"), compute_phases)]
    exposed = [phase for phase in compute_phases if phase not in ("forward", "backward", "recompute")]
    inside = row("exposed inside them", ("waits.forward", "waits.backward"), exposed)
    if exposed or inside.measured:
        rows.append(inside)
    if not exposed:
        rows.append(row("forward", ("phases.forward",), ("forward",)))
        rows.append(row("backward", ("phases.backward",), compute_phases[1:]))
    return [
        *rows,
        row("exposed comm (sync)", ("phases.sync",), sorted(sync_phases)),
        row("update", ("phases.update",), ("update",)),
        row("fetch + copy", ("phases.fetch", "phases.copy"), ("other",)),
    ]


def memory_rows(counted: Mapping[int, RecordedCounters], plan: Mapping[str, Any]) -> list[ReportRow]:
    """Compares the memory of the rank with the highest peak."""
    predicted = {key: finite_number(value) for key, value in bounded_object(plan.get("memory")).items()}
    if not counted:
        return [ReportRow("memory", "tensors", "B", None, predicted.get("tensors"), "no step had counters")]
    rank = max(counted, key=lambda each: (counted[each].peak_total, -each))
    counters = counted[rank]
    note = f"peak of rank {rank} in step {counters.step}, the highest of {len(counted)} ranks"
    rows = [ReportRow("memory", "tensors", "B", counters.peak_total, predicted.get("tensors"), note)]
    for name, (measured_classes, predicted_classes) in COMPARED_CLASSES.items():
        measured = sum(counters.at_peak.get(each, 0) for each in measured_classes)
        total = sum(predicted.get(each) or 0.0 for each in predicted_classes) if predicted else None
        if max(measured, total or 0.0) > counters.peak_total / 1000:
            parts = [each for each in predicted_classes if predicted.get(each)]
            rows.append(ReportRow("memory", name, "B", measured, total, ", ".join(parts) if len(parts) > 1 else ""))
    return [*rows, *exact_peaks(counted, plan)]


def exact_peaks(counted: Mapping[int, RecordedCounters], plan: Mapping[str, Any]) -> list[ReportRow]:
    """Compares the individual peak of each class of model state on rank 0; the prediction is exact on CPU."""
    exact, counters = byte_counts(bounded_object(plan.get("state_memory_exact")).get("0")), counted.get(0)
    if counters is None:
        return []
    return [
        ReportRow("memory", f"{name}, rank 0", "B", counters.peak.get(name), size, "individual peak")
        for name, size in exact.items()
    ]


def pipeline_rows(steps: Mapping[int, StepTable], pipelines: Mapping[int, Mapping[str, Any]]) -> list[ReportRow]:
    """Compares the micro-batches in flight and the bubble of every rank with those of its schedule."""
    rows: list[ReportRow] = []
    idle_fractions: list[float] = []
    bubble = None
    for rank, table in steps.items():
        pipeline = pipelines.get(rank)
        if not pipeline:
            continue
        bubble, predicted = finite_number(pipeline.get("bubble")), finite_number(pipeline.get("live"))
        in_flight = float(np.nanmax(table.live)) if np.isfinite(table.live).any() else None
        if len(rows) < MAX_PIPELINE_ROWS or in_flight != predicted:
            rows.append(
                ReportRow("pipeline", f"in flight, rank {rank}", "count", in_flight, predicted, "micro-batches")
            )
        if (idle := median_of(table.idle)) is not None:
            idle_fractions.append(idle)
    if rows:
        mean = sum(idle_fractions) / len(idle_fractions) if idle_fractions else None
        note = "mean over ranks; the prediction is the bubble of the schedule alone"
        rows.append(ReportRow("pipeline", "idle", "share", mean, bubble, note))
    return rows


def expert_rows(steps: StepTable) -> list[ReportRow]:
    imbalance = median_of(steps.imbalance)
    if imbalance is None:
        return []
    note = "load of the fullest expert relative to the mean; predictions assume a uniform load"
    return [
        ReportRow("experts", "imbalance", "count", imbalance, 1.0, note),
        ReportRow("experts", "dropped tokens", "count", median_of(steps.dropped), None, "per step"),
    ]
