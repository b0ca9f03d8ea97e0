"""The report of a run: every measured figure next to its prediction, with the error. Torch-free.

| measured phase | predicted phases |
|---|---|
| forward + backward | forward, backward, recompute, contention, and communication exposed inside them |
| sync | with a pipeline: bubble and pipeline; with DDP: replicate |
| update | update |
| fetch + copy | other |

The error is predicted / measured - 1: it is negative if the prediction was too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median
from typing import Any

from meshwright.config.reader import read_toml
from meshwright.errors import ConfigError
from meshwright.io import format_percent, format_seconds, read_json
from meshwright.observe.report.planned_machine import machine_notes
from meshwright.planner.exact.comm_volume import CollectiveVolume
from meshwright.planner.exact.compare import VolumeComparison, compare_volumes
from meshwright.telemetry.memory_classes import COMPARED_CLASSES
from meshwright.telemetry.run_folder import RunFolder
from meshwright.telemetry.run_measurements import RecordedStep, RunMeasurements, read_measurements
from meshwright.telemetry.untrusted_records import (
    RecordedCounters,
    bounded_object,
    byte_counts,
    finite_number,
    natural_number,
    parse_communication_row,
)
from meshwright.topology.axes import ALL_AXES
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import uses_ddp

MAX_RANKS = 1 << 16
"""The largest layout whose communication volume is compared."""
MAX_NOTES = 16
"""The notes of a prediction, and the ranks of a pipeline, that a report shows."""
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
class Report:
    run: str
    status: str
    attempt: int
    steps: int
    """The steps over which medians are taken."""
    verdict: str = ""
    within_interval: bool | None = None
    """Whether the measured step time lies in its 80% interval."""
    rows: list[ReportRow] = field(default_factory=list)
    communication: list[VolumeComparison] = field(default_factory=list)
    """The predicted and the measured communication volume of every rank with counters."""
    notes: list[str] = field(default_factory=list)

    @property
    def mismatches(self) -> list[VolumeComparison]:
        """The rows whose communication volume differs from the prediction."""
        return [row for row in self.communication if not row.equal]

    def row(self, section: str, figure: str) -> ReportRow | None:
        return next((row for row in self.rows if (row.section, row.figure) == (section, figure)), None)


def build_report(folder: RunFolder) -> Report:
    """Builds the report of a run that is in progress, has ended, or failed."""
    if not any((folder.root / name).exists() for name in ("run.toml", "events", "attempts")):
        raise ConfigError(f"{folder.root} is not a run folder", "expected a folder that meshwright train wrote")
    folder.require_own_folders()
    measurements, (plan, notes) = read_measurements(folder), read_plan(folder)
    if measurements is None:
        return with_verdict(Report(str(folder.root), run_status(folder, None), 0, 0, notes=notes), {}, False)
    steps = measurements.first.timed_steps()
    attempt = measurements.first.attempt
    notes += machine_notes(plan, measurements.first.start, planned_cluster(folder))
    if natural_number(plan.get("attempt")) not in (None, attempt):
        notes.append(f"the prediction was made for attempt {plan['attempt']}")
    layout, reason = predicted_layout(plan, measurements)
    communication: list[VolumeComparison] = []
    if layout is not None:
        communication, excluded = compare_communication(plan, measurements, layout)
        notes += excluded
    elif plan.get("communication_exact"):
        notes.append(f"communication volume is not compared: {reason}")
    if measurements.unread:
        notes.append(f"the records of {measurements.unread:,} more ranks were not read")
    report = Report(
        str(folder.root),
        run_status(folder, measurements),
        attempt,
        len(steps),
        rows=[
            *step_rows(steps, plan, measurements.first.start.get("unit")),
            *phase_rows(steps, plan, layout),
            *memory_rows(measurements, plan),
            *pipeline_rows(measurements),
            *expert_rows(steps),
        ],
        communication=communication,
        notes=notes,
    )
    return with_verdict(report, plan, any(records.counters for records in measurements.ranks.values()))


def read_plan(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """Returns plan.json, whose values are validated where they are used, and its notes."""
    try:
        plan = bounded_object(read_json(folder.plan_file))
    except ConfigError as error:
        return {}, [f"there is no prediction: {error.message}"]
    notes = plan.get("notes")
    return plan, [str(note)[:300] for note in notes[:MAX_NOTES]] if isinstance(notes, list) else []


def planned_cluster(folder: RunFolder) -> str:
    """The cluster that the run's layout was planned for, if a plan was."""
    try:
        return str(read_toml(folder.run_file).get("planned_for", ""))[:300]
    except ConfigError:
        return ""


def run_status(folder: RunFolder, measurements: RunMeasurements | None) -> str:
    """Says how many steps the run has done, and how its last attempt ended."""
    attempt = measurements.first.attempt if measurements else folder.last_attempt()
    if attempt == 0:
        return "nothing was recorded"
    steps = measurements.first.steps() if measurements else []
    total = natural_number(measurements.first.start.get("steps")) if measurements else None
    done = f"{steps[-1].step + 1:,} of {total:,} steps done" if steps and total is not None else "no step done"
    progress = f"attempt {attempt}, {done}"
    if measurements and measurements.first.ended:
        return f"{progress}, complete"
    try:
        incident = bounded_object(read_json(folder.incident(attempt)))
    except ConfigError:
        return f"{progress}, no end recorded: in progress or killed"
    lines = str(incident.get("message", ""))[:300].splitlines()
    return f"{progress}, {str(incident.get('outcome'))[:40]}" + (f": {lines[0]}" if lines else "")


def median_of(steps: Iterable[RecordedStep], figure: Callable[[RecordedStep], float | None]) -> float | None:
    values = [value for step in steps if (value := figure(step)) is not None]
    return median(values) if values else None


def step_rows(steps: list[RecordedStep], plan: Mapping[str, Any], unit: Any = None) -> list[ReportRow]:
    """The time of a step. `unit` is what the run calls a target; a plan predicts tokens."""
    seconds = median_of(steps, lambda step: step.seconds)
    flops, peak = finite_number(plan.get("flops")), finite_number(plan.get("peak_flops"))
    mfu = flops / seconds / peak if seconds and flops and peak else None
    rate = median_of(steps, lambda step: step.tokens / step.seconds)
    rate_name = f"{unit}/s" if unit in UNITS else "tokens/s"
    no_step = "" if steps else "no timed step yet"
    no_peak = "" if peak or not plan.get("plan") else "the device's peak FLOP/s is unknown"
    return [
        ReportRow("step", "step time", "s", seconds, finite_number(plan.get("seconds")), no_step),
        ReportRow("step", rate_name, "/s", rate, finite_number(plan.get("tokens_per_second"))),
        ReportRow("step", "MFU", "share", mfu, finite_number(plan.get("mfu")), no_peak),
    ]


def phase_rows(steps: list[RecordedStep], plan: Mapping[str, Any], layout: Layout | None) -> list[ReportRow]:
    """Compares phases as the table of this module maps them."""
    predicted = {
        phase: value
        for phase, item in bounded_object(plan.get("phases")).items()
        if (value := finite_number(item)) is not None
    }
    sync_phases = {"bubble", "pipeline"} | ({"replicate"} if layout is not None and uses_ddp(layout) else set())
    compute_phases = [phase for phase in predicted if phase not in sync_phases | {"update", "other"}]

    def row(name: str, measured_phases: tuple[str, ...], predicted_phases: Iterable[str]) -> ReportRow:
        measured = median_of(steps, lambda step: sum(step.phases.get(phase, 0.0) for phase in measured_phases))
        names = [phase for phase in predicted_phases if phase in predicted]
        total = sum(predicted[phase] for phase in names) if predicted else None
        return ReportRow("phases", name, "s", measured, total, ", ".join(names) if len(names) > 1 else "")

    rows = [row("forward + backward", ("forward", "backward"), compute_phases)]
    exposed = [phase for phase in compute_phases if phase not in ("forward", "backward", "recompute")]
    if exposed:
        total = sum(predicted[phase] for phase in exposed)
        note = f"{', '.join(exposed)}; measured as part of forward + backward"
        rows.append(ReportRow("phases", "exposed inside them", "s", None, total, note))
    else:
        rows += [row("forward", ("forward",), ("forward",)), row("backward", ("backward",), compute_phases[1:])]
    return [
        *rows,
        row("exposed comm (sync)", ("sync",), sorted(sync_phases)),
        row("update", ("update",), ("update",)),
        row("fetch + copy", ("fetch", "copy"), ("other",)),
    ]


def memory_rows(measurements: RunMeasurements, plan: Mapping[str, Any]) -> list[ReportRow]:
    """Compares the memory of the rank with the highest peak."""
    counted = {rank: records.counters for rank, records in measurements.ranks.items() if records.counters is not None}
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


def predicted_layout(plan: Mapping[str, Any], measurements: RunMeasurements) -> tuple[Layout | None, str]:
    """Returns the layout of the prediction if it is valid and has the ranks of the run, otherwise the reason."""
    given = bounded_object(bounded_object(plan.get("plan")).get("layout"))
    degrees = {axis: natural_number(given.get(axis)) for axis in ALL_AXES}
    if not all(degree and degree <= MAX_RANKS for degree in degrees.values()):
        return None, "the prediction has no layout"
    layout = Layout(**{axis: degree or 1 for axis, degree in degrees.items()})
    if prod(layout.degrees) > MAX_RANKS or layout.expert_axes_size % layout.expert:
        return None, "the predicted layout is out of range"
    if layout.ranks != natural_number(measurements.first.start.get("ranks")):
        return None, "the prediction is for another number of ranks"
    return layout, ""


def compare_communication(
    plan: Mapping[str, Any], measurements: RunMeasurements, layout: Layout
) -> tuple[list[VolumeComparison], list[str]]:
    """Returns every measured row next to the exact prediction, and notes on what cannot be compared."""
    exact = bounded_object(plan.get("communication_exact"))
    data_dependent = bounded_object(plan.get("communication_data_dependent"))
    measured = {
        rank: [CollectiveVolume(*row) for row in records.counters.communication]
        for rank, records in measurements.ranks.items()
        if records.counters is not None
    }
    predicted: dict[int, list[CollectiveVolume]] = {}
    for rank in measured:
        stride = layout.stride("pipeline")
        rows = exact.get(str(rank // stride * stride))
        if isinstance(rows, list):
            parsed = (parse_communication_row(row) for row in rows[:256])
            predicted[rank] = [CollectiveVolume(*row) for row in parsed if row is not None]
    notes = [f"{axis} is not compared: {str(why)[:200]}" for axis, why in data_dependent.items()]
    if missing := measured.keys() - predicted.keys():
        notes.append(f"the communication volume of {len(missing)} ranks was not predicted")
    return list(compare_volumes(layout, predicted, measured, data_dependent)), notes


def pipeline_rows(measurements: RunMeasurements) -> list[ReportRow]:
    """Compares the micro-batches in flight and the bubble of every rank with those of its schedule."""
    rows: list[ReportRow] = []
    idle_fractions: list[float] = []
    bubble = None
    for rank, records in measurements.ranks.items():
        pipeline = bounded_object(records.start.get("pipeline"))
        if not pipeline:
            continue
        steps = records.timed_steps()
        bubble, predicted = finite_number(pipeline.get("bubble")), finite_number(pipeline.get("live"))
        in_flight = max((step.live for step in steps if step.live is not None), default=None)
        if len(rows) < MAX_NOTES or in_flight != predicted:
            rows.append(
                ReportRow("pipeline", f"in flight, rank {rank}", "count", in_flight, predicted, "micro-batches")
            )
        if (idle := median_of(steps, lambda step: step.idle)) is not None:
            idle_fractions.append(idle)
    if rows:
        mean = sum(idle_fractions) / len(idle_fractions) if idle_fractions else None
        note = "mean over ranks; the prediction is the bubble of the schedule alone"
        rows.append(ReportRow("pipeline", "idle", "share", mean, bubble, note))
    return rows


def expert_rows(steps: list[RecordedStep]) -> list[ReportRow]:
    imbalance = median_of(steps, lambda step: step.imbalance)
    if imbalance is None:
        return []
    dropped = median_of(steps, lambda step: step.dropped)
    note = "load of the fullest expert relative to the mean; predictions assume a uniform load"
    return [
        ReportRow("experts", "imbalance", "count", imbalance, 1.0, note),
        ReportRow("experts", "dropped tokens", "count", dropped, None, "per step"),
    ]


def with_verdict(report: Report, plan: Mapping[str, Any], has_counters: bool) -> Report:
    """Adds the verdict, one line on step time, communication and memory."""
    low, high = finite_number(plan.get("low")), finite_number(plan.get("high"))
    step, memory = report.row("step", "step time"), report.row("memory", "tensors")
    within_interval = None
    if step is None or step.measured is None:
        time = "no step measured"
    elif step.predicted is None:
        time = f"step time {format_seconds(step.measured)}, not predicted"
    else:
        error = format_percent(step.error, 1, signed=True)
        time = f"step time {format_seconds(step.measured)}, predicted {format_seconds(step.predicted)} ({error})"
        if low is not None and high is not None:
            within_interval = low <= step.measured <= high
            interval = f"the 80% interval {format_seconds(low)} to {format_seconds(high)}"
            time += f", {'within' if within_interval else 'outside'} {interval}"
    if report.mismatches:
        rows = f"{len(report.mismatches)} of {len(report.communication)} rows"
        communication = f"BYTES DIFFER in {rows}, first: {report.mismatches[0]}"
    elif report.communication:
        communication = "bytes equal"
    else:
        communication = "bytes not predicted" if has_counters else "bytes not counted"
    memory_error = memory.error if memory is not None else None
    peak = "memory not compared" if memory_error is None else f"memory {format_percent(memory_error, 1, signed=True)}"
    return replace(report, within_interval=within_interval, verdict=f"{time}; {communication}; {peak}")
