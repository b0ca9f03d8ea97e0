"""A run's measured figures beside the predicted ones, with the error of each. Torch-free.

| measured | predicted phases |
|---|---|
| forward + backward | forward, backward, recompute, contention, and the messages that are waited for inside passes |
| sync | under a pipeline bubble and pipeline; of whole copies by DDP replicate |
| update | update |
| fetch + copy | other |

The error is predicted / measured - 1: below zero where the prediction was too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import ConfigError
from meshwright.io import format_percent, format_seconds, read_json
from meshwright.planner.exact.comm_volume import CollectiveVolume
from meshwright.planner.exact.compare import VolumeComparison, compare_volumes
from meshwright.telemetry.memory_classes import COMPARED_CLASSES
from meshwright.telemetry.run_folder import RunFolder
from meshwright.telemetry.run_measurements import (
    RecordedCounters,
    RecordedStep,
    RunMeasurements,
    bounded_object,
    byte_counts,
    finite_number,
    natural_number,
    parse_communication_row,
    read_measurements,
)
from meshwright.topology.axes import ALL_AXES
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import uses_ddp

MAX_RANKS = 1 << 16
"""Ranks of a layout whose bytes are compared."""
MAX_NOTES = 16


@dataclass(frozen=True)
class ReportRow:
    section: str
    figure: str
    unit: str
    """s, B, /s, share or count"""
    measured: float | None
    predicted: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


@dataclass(frozen=True)
class Report:
    run: str
    status: str
    attempt: int
    steps: int
    """that the median is of"""
    verdict: str = ""
    inside: bool | None = None
    """whether the step lies in its interval"""
    rows: list[ReportRow] = field(default_factory=list)
    traffic: list[VolumeComparison] = field(default_factory=list)
    """of every rank that counted; those that are not equal are broken"""
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[VolumeComparison]:
        return [pair for pair in self.traffic if not pair.equal]

    def row(self, section: str, figure: str) -> ReportRow | None:
        return next((twin for twin in self.rows if (twin.section, twin.figure) == (section, figure)), None)


def build_report(folder: RunFolder) -> Report:
    if not any((folder.root / name).exists() for name in ("run.toml", "events", "attempts")):
        raise ConfigError(f"{folder.root} is no run folder", "allowed: a folder that meshwright train has written")
    found, (plan, notes) = read_measurements(folder), read_plan(folder)
    if found is None:
        return with_verdict(Report(str(folder.root), run_status(folder, None), 0, 0, notes=notes), {}, False)
    steps = found.first.timed_steps()
    if natural_number(plan.get("attempt")) not in (None, found.first.attempt):
        notes.append(f"the prediction is of attempt {plan['attempt']}")
    layout, why = predicted_layout(plan, found)
    pairs: list[VolumeComparison] = []
    if layout is not None:
        pairs, more = compare_bytes(plan, found, layout)
        notes += more
    elif plan.get("communication_exact"):
        notes.append(f"bytes are not compared: {why}")
    twins = [
        *step_rows(steps, plan),
        *phase_rows(steps, plan, layout),
        *memory_rows(found, plan),
        *pipeline_rows(found),
        *expert_rows(steps),
    ]
    if found.unread:
        notes.append(f"{found.unread:,} more ranks were not read")
    status = run_status(folder, found)
    whole_report = Report(
        str(folder.root), status, found.first.attempt, len(steps), rows=twins, traffic=pairs, notes=notes
    )
    return with_verdict(whole_report, plan, any(seen.counters for seen in found.ranks.values()))


def read_plan(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """plan.json, checked where it is used, and what it notes."""
    try:
        plan = bounded_object(read_json_file(folder.plan_file))
    except ConfigError as error:
        return {}, [f"nothing was predicted: {error.message}"]
    given = plan.get("notes")
    return plan, [str(note)[:300] for note in given[:MAX_NOTES]] if isinstance(given, list) else []


def read_json_file(path: Path) -> Any:
    """Whoever opens something else than a file may wait for ever."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file", "give a run folder")
    return read_json(path)


def run_status(folder: RunFolder, found: RunMeasurements | None) -> str:
    """How far the run is, and how its last attempt ended."""
    attempt = found.first.attempt if found else folder.last_attempt()
    if attempt == 0:
        return "nothing was recorded"
    made = found.first.steps() if found else []
    wanted = natural_number(found.first.start.get("steps")) if found else None
    done = f"{made[-1].step + 1:,} of {wanted:,} steps" if made and wanted is not None else "no step"
    name = f"attempt {attempt}, {done}"
    if found and found.first.ended:
        return f"{name}, complete"
    try:
        incident = bounded_object(read_json_file(folder.incident(attempt)))
    except ConfigError:
        return f"{name}, no end on record: in progress, or lost"
    lines = str(incident.get("message", ""))[:300].splitlines()
    return f"{name}, {str(incident.get('outcome'))[:40]}" + (f": {lines[0]}" if lines else "")


def median_of(steps: Iterable[RecordedStep], figure: Callable[[RecordedStep], float | None]) -> float | None:
    values = [value for step in steps if (value := figure(step)) is not None]
    return median(values) if values else None


def step_rows(steps: list[RecordedStep], plan: Mapping[str, Any]) -> list[ReportRow]:
    seconds = median_of(steps, lambda step: step.seconds)
    flops, peak = finite_number(plan.get("flops")), finite_number(plan.get("peak_flops"))
    used = flops / seconds / peak if seconds and flops and peak else None
    rate = median_of(steps, lambda step: step.tokens / step.seconds)
    note = "" if peak or not plan.get("plan") else "the device's peak is not known"
    return [
        ReportRow(
            "step", "step", "s", seconds, finite_number(plan.get("seconds")), "" if steps else "no step to measure yet"
        ),
        ReportRow("step", "tokens/s", "/s", rate, finite_number(plan.get("tokens_per_second"))),
        ReportRow("step", "of peak (MFU)", "share", used, finite_number(plan.get("mfu")), note),
    ]


def phase_rows(steps: list[RecordedStep], plan: Mapping[str, Any], layout: Layout | None) -> list[ReportRow]:
    """See the table above."""
    given = {
        phase: value
        for phase, item in bounded_object(plan.get("phases")).items()
        if (value := finite_number(item)) is not None
    }
    waited = {"bubble", "pipeline"} | ({"replicate"} if layout is not None and uses_ddp(layout) else set())
    passes = [phase for phase in given if phase not in waited | {"update", "other"}]

    def twin(name: str, phases: tuple[str, ...], meaning: Iterable[str]) -> ReportRow:
        spent = median_of(steps, lambda step: sum(step.phases.get(phase, 0.0) for phase in phases))
        names = [phase for phase in meaning if phase in given]
        return ReportRow(
            "phases", name, "s", spent, sum(given[phase] for phase in names) if given else None, ", ".join(names)
        )

    found = [twin("forward + backward", ("forward", "backward"), passes)]
    inside = [phase for phase in passes if phase not in ("forward", "backward", "recompute")]
    if inside:
        note = f"{', '.join(inside)}: waited for inside passes, and measured with them"
        found.append(ReportRow("phases", "exposed in passes", "s", None, sum(given[phase] for phase in inside), note))
    else:
        found += [twin("forward", ("forward",), ("forward",)), twin("backward", ("backward",), passes[1:])]
    return [
        *found,
        twin("exposed (sync)", ("sync",), sorted(waited)),
        twin("update", ("update",), ("update",)),
        twin("fetch + copy", ("fetch", "copy"), ("other",)),
    ]


def memory_rows(found: RunMeasurements, plan: Mapping[str, Any]) -> list[ReportRow]:
    """Of the rank that held most."""
    counted = {rank: seen.counters for rank, seen in found.ranks.items() if seen.counters is not None}
    predicted = {key: finite_number(value) for key, value in bounded_object(plan.get("memory")).items()}
    if not counted:
        return [ReportRow("memory", "tensors", "B", None, predicted.get("tensors"), "no step was counted")]
    rank = max(counted, key=lambda one: (counted[one].peak_total, -one))
    heaviest = counted[rank]
    note = f"rank {rank} at its peak in step {heaviest.step}, which held most of {len(counted)}"
    twins = [ReportRow("memory", "tensors", "B", heaviest.peak_total, predicted.get("tensors"), note)]
    for name, (ours, theirs) in COMPARED_CLASSES.items():
        held = sum(heaviest.at_peak.get(each, 0) for each in ours)
        meant = sum(predicted.get(each) or 0.0 for each in theirs) if predicted else None
        if max(held, meant or 0.0) > heaviest.peak_total / 1000:
            twins.append(
                ReportRow("memory", name, "B", held, meant, ", ".join(each for each in theirs if predicted.get(each)))
            )
    return [*twins, *exact_peaks(counted, plan)]


def exact_peaks(counted: Mapping[int, RecordedCounters], plan: Mapping[str, Any]) -> list[ReportRow]:
    """The peaks that classes of state have each by itself, of the first rank; exact on CPU."""
    exact, first = byte_counts(bounded_object(plan.get("state_memory_exact")).get("0")), counted.get(0)
    if first is None:
        return []
    return [
        ReportRow("memory", f"{name}, own peak of rank 0", "B", first.peak.get(name), size)
        for name, size in exact.items()
    ]


def predicted_layout(plan: Mapping[str, Any], found: RunMeasurements) -> tuple[Layout | None, str]:
    """The layout that was predicted, where it can be and is the run's; else why not."""
    given = bounded_object(bounded_object(plan.get("plan")).get("layout"))
    degrees = {axis: natural_number(given.get(axis)) for axis in ALL_AXES}
    if not all(degree and degree <= MAX_RANKS for degree in degrees.values()):
        return None, "the prediction has no layout"
    layout = Layout(**{axis: degree or 1 for axis, degree in degrees.items()})
    if prod(layout.degrees) > MAX_RANKS or layout.expert_axes_size % layout.expert:
        return None, "the predicted layout is out of range"
    if layout.ranks != natural_number(found.first.start.get("ranks")):
        return None, "the prediction is for another number of ranks"
    return layout, ""


def compare_bytes(
    plan: Mapping[str, Any], found: RunMeasurements, layout: Layout
) -> tuple[list[VolumeComparison], list[str]]:
    """Every counted row beside that of the formula, and what could not be compared."""
    exact, untold = (
        bounded_object(plan.get("communication_exact")),
        bounded_object(plan.get("communication_data_dependent")),
    )
    counted = {
        rank: [CollectiveVolume(*row) for row in seen.counters.communication]
        for rank, seen in found.ranks.items()
        if seen.counters is not None
    }
    expected, notes = {}, [f"{axis} is not compared: {str(why)[:200]}" for axis, why in untold.items()]
    for rank in counted:
        stride = layout.stride("pipeline")
        rows = exact.get(str(rank // stride * stride))
        if isinstance(rows, list):
            expected[rank] = [
                CollectiveVolume(*sent) for row in rows[:256] if (sent := parse_communication_row(row)) is not None
            ]
    if left := counted.keys() - expected.keys():
        notes.append(f"bytes of {len(left)} ranks were not predicted")
    return list(compare_volumes(layout, expected, counted, untold)), notes


def pipeline_rows(found: RunMeasurements) -> list[ReportRow]:
    """What every rank's schedule promised, and what it measured."""
    twins: list[ReportRow] = []
    idle: list[float] = []
    promised = None
    for rank, seen in found.ranks.items():
        pipe = bounded_object(seen.start.get("pipeline"))
        if not pipe:
            continue
        steps = seen.timed_steps()
        promised = finite_number(pipe.get("bubble"))
        live = max((step.live for step in steps if step.live is not None), default=None)
        if len(twins) < MAX_NOTES or live != finite_number(pipe.get("live")):
            twins.append(
                ReportRow(
                    "pipeline", f"live micro-batches, rank {rank}", "count", live, finite_number(pipe.get("live"))
                )
            )
        if (waiting := median_of(steps, lambda step: step.idle)) is not None:
            idle.append(waiting)
    if twins:
        note = "by the schedule alone; the mean over ranks"
        twins.append(ReportRow("pipeline", "idle", "share", sum(idle) / len(idle) if idle else None, promised, note))
    return twins


def expert_rows(steps: list[RecordedStep]) -> list[ReportRow]:
    imbalance = median_of(steps, lambda step: step.imbalance)
    if imbalance is None:
        return []
    dropped = median_of(steps, lambda step: step.dropped)
    note = "the fullest expert as a multiple of an even share, which is what plans are made for"
    return [
        ReportRow("experts", "imbalance", "count", imbalance, 1.0, note),
        ReportRow("experts", "dropped visits", "count", dropped, None, "a step"),
    ]


def with_verdict(report: Report, plan: Mapping[str, Any], counted: bool) -> Report:
    """With its verdict in one line."""
    low, high = finite_number(plan.get("low")), finite_number(plan.get("high"))
    step, held = report.row("step", "step"), report.row("memory", "tensors")
    inside = None
    if step is None or step.measured is None:
        words = ["no step measured"]
    elif step.predicted is None:
        words = [f"step {format_seconds(step.measured)}, no seconds predicted"]
    else:
        words = [
            f"step {format_seconds(step.measured)}, predicted {format_seconds(step.predicted)} "
            f"({format_percent(step.error, 1, signed=True)})"
        ]
        if low is not None and high is not None:
            inside = low <= step.measured <= high
            words.append(
                "inside its interval" if inside else f"outside of {format_seconds(low)} to {format_seconds(high)}"
            )
    spent = ", ".join(words)
    if report.broken:
        sent = f"BYTES DIFFER in {len(report.broken)} of {len(report.traffic)} rows, first {report.broken[0]}"
    else:
        sent = "bytes equal" if report.traffic else "bytes not predicted" if counted else "bytes not counted"
    error = held.error if held is not None else None
    weight = f"memory {format_percent(error, 1, signed=True)}" if error is not None else "memory not compared"
    return replace(report, inside=inside, verdict=f"{spent}; {sent}; {weight}")
