"""The report of a run: what the ranks of its last attempt measured, compared with its prediction. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_percent, format_seconds, read_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.untrusted_records import (
    RecordedCounters,
    bounded_object,
    finite_number,
    natural_number,
    parse_communication_row,
)
from meshwright.base.topology.axes import ALL_AXES
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.insight.report.compared_figures import (
    Measurements,
    ReportRow,
    expert_rows,
    memory_rows,
    phase_rows,
    pipeline_rows,
    step_rows,
)
from meshwright.planner.cost.comm_volume import CollectiveVolume
from meshwright.planner.cost.compare_volumes import VolumeComparison, compare_volumes
from meshwright.planner.report.generator_figures import generator_rows, read_rollout_events
from meshwright.planner.report.planned_machine import machine_notes

MAX_RANKS = 1 << 16
"""The largest layout whose communication volume is compared."""
MAX_NOTES = 16
"""The notes of a prediction that a report shows."""


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
    other_machine: list[str] = field(default_factory=list)
    """Sentences on plans that were made for another machine than the run was on."""
    history: RunHistory | None = field(default=None, repr=False, compare=False)
    """What happened in the run, as far as it was recorded when the report was made."""
    measurements: Measurements | None = field(default=None, repr=False, compare=False)

    @property
    def mismatches(self) -> list[VolumeComparison]:
        """The rows whose communication volume differs from the prediction."""
        return [row for row in self.communication if not row.equal]

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from meshwright.insight.report.html_page import render_page
        from meshwright.insight.report.run_document import build_document

        return render_page(build_document(self))

    def to_markdown(self) -> str:
        """The figures of the page as Markdown."""
        from meshwright.insight.report.markdown_page import render_markdown
        from meshwright.insight.report.run_document import build_document

        return render_markdown(build_document(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: headline signals, verdict, curves and account."""
        from meshwright.insight.report.html_page import render_fragment
        from meshwright.insight.report.run_document import summarize

        return render_fragment(summarize(self, time.time()))

    def row(self, section: str, figure: str) -> ReportRow | None:
        return next((row for row in self.rows if (row.section, row.figure) == (section, figure)), None)


def build_report(folder: RunFolder) -> Report:
    """Builds the report of a run that is in progress, has ended, or failed."""
    history = RunHistory(folder)
    plan, notes = read_plan(folder)
    attempt = history.measured_attempt
    if attempt is None or not attempt.start:
        attempt = next((each for each in reversed(history.attempts) if each.start), None)
    if attempt is None:
        newest = history.newest_attempt
        empty = Report(str(folder.root), run_status(newest, False, 0), 0, 0, notes=notes, history=history)
        return with_verdict(empty, {}, False)
    measurements = Measurements.of_attempt(history, attempt.number, attempt.ranks)
    steps = measurements.steps.get(0, history.steps().select(slice(0, 0)))
    other_machine = machine_notes(plan, attempt.start, str(history.config.get("planned_for", "")))
    if natural_number(plan.get("attempt")) not in (None, attempt.number):
        notes.append(f"the prediction was made for attempt {plan['attempt']}")
    layout, reason = predicted_layout(plan, attempt.ranks)
    communication: list[VolumeComparison] = []
    if layout is not None:
        communication, excluded = compare_communication(plan, measurements.counters, layout)
        notes += excluded
    elif plan.get("communication_exact"):
        notes.append(f"communication volume is not compared: {reason}")
    if unread := attempt.ranks - len(measurements.steps):
        notes.append(f"ranks of which no record was read: {unread:,}")
    report = Report(
        str(folder.root),
        run_status(attempt, len(history.steps().of_attempt(attempt.number)) > 0, history.total_steps),
        attempt.number,
        len(steps),
        rows=[
            *step_rows(steps, plan, attempt.start.get("unit")),
            *phase_rows(steps, plan, layout),
            *memory_rows(measurements.counters, plan),
            *pipeline_rows(measurements.steps, history.pipelines),
            *expert_rows(steps),
            *generator_rows(read_rollout_events(folder, attempt.number), steps, plan),
        ],
        communication=communication,
        notes=[*other_machine, *notes],
        other_machine=other_machine,
        history=history,
        measurements=measurements,
    )
    return with_verdict(report, plan, bool(measurements.counters))


def read_plan(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """Returns plan.json, whose values are validated where they are used, and its notes."""
    try:
        plan = bounded_object(read_json(folder.plan_file))
    except ConfigError as error:
        return {}, [f"there is no prediction: {error.message}"]
    notes = plan.get("notes")
    return plan, [str(note)[:300] for note in notes[:MAX_NOTES]] if isinstance(notes, list) else []


def run_status(attempt: AttemptHistory | None, has_steps: bool, total: int) -> str:
    """Says how many steps the run has done, and how its last attempt ended."""
    if attempt is None:
        return "nothing was recorded"
    done = f"{attempt.done:,} of {total:,} steps done" if has_steps else "no step done"
    progress = f"attempt {attempt.number}, {done}"
    if attempt.outcome == "lost":
        return f"{progress}, no end recorded: its processes are gone"
    outcome = "in progress" if attempt.outcome == "running" else attempt.outcome
    lines = attempt.incident.message[:300].splitlines() if attempt.incident is not None else []
    return f"{progress}, {outcome}" + (f": {lines[0]}" if lines else "")


def predicted_layout(plan: Mapping[str, Any], ranks: int) -> tuple[Layout | None, str]:
    """Returns the layout of the prediction if it is valid and has the ranks of the run, otherwise the reason."""
    given = bounded_object(bounded_object(plan.get("plan")).get("layout"))
    degrees = {axis: natural_number(given.get(axis)) for axis in ALL_AXES}
    if not all(degree and degree <= MAX_RANKS for degree in degrees.values()):
        return None, "the prediction has no layout"
    layout = Layout(**{axis: degree or 1 for axis, degree in degrees.items()})
    if prod(layout.degrees) > MAX_RANKS or layout.expert_axes_size % layout.expert:
        return None, "the predicted layout is out of range"
    if layout.ranks != ranks:
        return None, "the prediction is for another number of ranks"
    return layout, ""


def compare_communication(
    plan: Mapping[str, Any], counters: Mapping[int, RecordedCounters], layout: Layout
) -> tuple[list[VolumeComparison], list[str]]:
    """Returns every measured row next to the exact prediction, and notes on what cannot be compared."""
    exact = bounded_object(plan.get("communication_exact"))
    data_dependent = bounded_object(plan.get("communication_data_dependent"))
    measured = {rank: [CollectiveVolume(*row) for row in counted.communication] for rank, counted in counters.items()}
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
        communication = "communicated bytes as predicted"
    else:
        communication = "bytes not predicted" if has_counters else "bytes not counted"
    memory_error = memory.error if memory is not None else None
    peak = "memory not compared"
    if memory_error is not None:
        peak = f"error of peak memory {format_percent(memory_error, 1, signed=True)}"
    return replace(report, within_interval=within_interval, verdict=f"{time}; {communication}; {peak}")
