"""The explanation of a run in five parts, from its own figures. Torch-free.

problem: what is trained, and the bytes of its model state; mechanism: what is replicated and sharded, and the schedule;
communication: collectives, bytes and exposed seconds as measured; tradeoff: this layout against the alternatives that
the planner ranks; measurement: what was measured, next to its prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.waits import divide_waits
from meshwright.base.io import format_bytes, format_count, format_percent, format_seconds
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.untrusted_records import bounded_object, finite_number, natural_number
from meshwright.insight.report.compared_figures import Measurements, mean_of
from meshwright.insight.report.document import Section, Table
from meshwright.insight.report.profiled_steps import profiled_exposure
from meshwright.insight.report.report_text import UNITS
from meshwright.insight.report.run_report import Report
from meshwright.planner.describe import describe_plan
from meshwright.planner.report.planned_machine import describe_machine, text
from meshwright.planner.report.run_plan import RunPlan
from meshwright.planner.search.explanation.explain import describe_difference, optimizer_semantics
from meshwright.planner.search.explanation.mechanism import mechanism, replicated, sharded

STATE_CLASSES = ("parameter", "gradient", "optimizer")
"""The classes of memory that are model state."""
MEASURED_FIGURES = (
    ("step", "step time"),
    ("step", "MFU"),
    ("step", "exposed communication"),
    ("pipeline", "idle"),
    ("memory", "tensors"),
)
"""The figures of the part on measurement; throughput follows the step time."""


def explain_run(report: Report, attempt: AttemptHistory, plan: Mapping[str, Any], run_plan: RunPlan) -> Section:
    """Explains a run.

    Args:
        report: the compared figures of the run.
        attempt: the attempt that they are of.
        plan: the content of plan.json.
        run_plan: what the planner knows about the run's layout.
    """
    measurements = report.measurements or Measurements({}, {})
    sentences, table = communication(report, measurements, plan)
    return Section(
        "Explanation",
        parts=[
            Section("Problem", [*problem(attempt.start, measurements, plan, run_plan)]),
            Section("Mechanism", [*mechanism_of_run(attempt.start, run_plan)]),
            Section("Communication", sentences, tables=[table] if table.rows else []),
            Section("Tradeoff", [*tradeoff(report, run_plan)], alternatives(run_plan)),
            Section("Measurement", [measured_steps(report)], [*measurement(report, plan)]),
        ],
    )


def problem(
    start: Mapping[str, Any], measurements: Measurements, plan: Mapping[str, Any], run_plan: RunPlan
) -> Iterator[str]:
    parameters, ranks = natural_number(start.get("parameters")), natural_number(start.get("ranks"))
    steps, batch = natural_number(start.get("steps")), text(start.get("batch"))
    model = f"{format_count(parameters)} parameters" if parameters is not None else "A model"
    settings = ", ".join(filter(None, (text(start.get("optimizer")), text(start.get("precision")))))
    yield (
        f"{model} {'are' if parameters is not None else 'is'} trained for {steps or 0:,} steps"
        f"{f' ({settings})' if settings else ''} on {ranks or 0:,} rank{'' if ranks == 1 else 's'} of "
        f"{describe_machine(start)}; batch: {batch or 'not recorded'}."
    )
    capacity = finite_number(bounded_object(plan.get("memory")).get("capacity"))
    limit = f"a device has {format_bytes(capacity)}" if capacity else "the memory of the device is not known"
    if run_plan.estimate is not None:
        job = run_plan.estimate.job
        trained, frozen = (job.model.parameters * share for share in (job.trained.parameters, job.trained.frozen))
        sizes = {
            "parameters": trained * job.trainer.parameter_bytes + frozen * max(4.0, job.trainer.parameter_bytes),
            "gradients": trained * job.trainer.gradient_bytes,
            "optimizer state": trained * job.optimizer_bytes,
        }
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        total = format_bytes(sum(sizes.values()))
        yield f"Without sharding, the model state is {total} ({parts}); {limit}."
    elif capacity:
        yield f"{limit[0].upper()}{limit[1:]}."
    if 0 in measurements.counters:
        counters = measurements.counters[0]
        state = {name: counters.at_peak.get(name, 0) for name in STATE_CLASSES}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in state.items())
        yield (
            f"At the peak of step {counters.step}, rank 0 has {format_bytes(sum(state.values()))} of model state "
            f"({parts}) among {format_bytes(counters.peak_total)} of tensors."
        )


def mechanism_of_run(start: Mapping[str, Any], run_plan: RunPlan) -> Iterator[str]:
    if run_plan.estimate is not None:
        yield from (f"{sentence[0].upper()}{sentence[1:]}" for sentence in mechanism(run_plan.estimate))
        same = replicated(run_plan.estimate).removeprefix("Replicated ")
        yield f"Replicated: {same[0].lower()}{same[1:]}"
        split = sharded(run_plan.estimate)
        yield f"Sharded: {split[0].lower()}{split[1:]}"
        yield optimizer_semantics(run_plan.estimate.job)
        return
    shard = text(start.get("shard"))
    what = f", {shard} sharded over the data-parallel ranks" if shard not in ("", "none") else ""
    yield f"Layout: {text(start.get('layout')) or 'not recorded'}{what}."
    pipeline = bounded_object(start.get("pipeline"))
    if pipeline:
        yield f"Pipeline schedule: {text(pipeline.get('schedule'))}."


def communication(report: Report, measurements: Measurements, plan: Mapping[str, Any]) -> tuple[list[str], Table]:
    """The exposed time as sentences, and the collectives as a table."""
    steps, counters = measurements.steps.get(0), measurements.counters.get(0)
    sentences = []
    if steps is not None and (exposed := mean_of(steps.exposed)) is not None:
        seconds = mean_of(steps.seconds) or exposed
        waits = {phase: mean_of(column) for phase, column in steps.waits.items()}
        by_phase = {"sync": mean_of(steps.phases["sync"]), **waits}
        parts = ", ".join(f"{phase} {format_seconds(by_phase[phase] or 0)}" for phase in STEP_PHASES if by_phase[phase])
        sentences.append(
            f"In the mean of {len(steps):,} steps of attempt {report.attempt}, communication that compute does not "
            f"hide takes {format_seconds(exposed)} of the {format_seconds(seconds)} of a step "
            f"({format_percent(exposed / seconds)}) on rank 0, measured by "
            f"{steps.exposed_source}" + (f": {parts}." if parts else ".")
        )
    sentences += exposed_in_profile(report)
    if counters is None:
        return [*sentences, "The collectives were not counted: no step had counters."], Table((), [])
    wire = sum(row[3] for row in counters.communication)
    sentences.insert(0, f"Rank 0 sends {format_bytes(wire)} of wire bytes per step, counted in step {counters.step}.")
    predicted = predicted_exposed(plan)
    rows = [
        [axis, collective, f"{message:,}", f"{sent:,}", seconds_or_none(predicted.get((axis, collective)))]
        for axis, collective, message, sent in counters.communication
    ]
    differ = {(row.axis, row.collective) for row in report.mismatches if 0 in row.ranks}
    marked = [index for index, row in enumerate(rows) if (row[0], row[1]) in differ]
    headings = ("axis", "collective", "message bytes", "wire bytes", "exposed, predicted")
    return sentences, Table(headings, rows, (0, 1), marked)


def exposed_in_profile(report: Report) -> Iterator[str]:
    """The exposed seconds by axis, which are exact in profiled steps."""
    steps, by_axis = profiled_exposure(report.history.folder) if report.history is not None else (0, {})
    if steps:
        listed = ", ".join(f"{axis} {format_seconds(spent)}" for axis, spent in by_axis.items())
        yield f"By axis, exactly, on rank 0 in the mean of the {steps} newest profiled steps: {listed or 'nothing'}."


def predicted_exposed(plan: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The predicted exposed seconds by axis and collective."""
    rows, total = plan.get("communication"), dict[tuple[str, str], float]()
    for row in map(bounded_object, rows[:256] if isinstance(rows, list) else ()):
        if (seconds := finite_number(row.get("exposed_seconds"))) is not None:
            key = text(row.get("axis")), text(row.get("collective"))
            total[key] = total.get(key, 0.0) + seconds
    return total


def seconds_or_none(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds is not None else "-"


def tradeoff(report: Report, run_plan: RunPlan) -> Iterator[str]:
    """What the layout costs, and what the alternatives would cost by the same cost model."""
    costs = measured_costs(report)
    lost = [f"{name} {format_seconds(seconds)}" for name, seconds in costs.items() if seconds > 0]
    yield f"This layout costs, per step on rank 0: {', '.join(lost) or 'no measured wait for other ranks'}."
    plan, cluster = run_plan.estimate, run_plan.cluster
    if plan is None or not run_plan.alternatives or cluster is None:
        yield f"There is no comparison with other layouts: {run_plan.reason}."
        return
    place = (
        f"is number {run_plan.position} of the planner's ranking"
        if run_plan.position is not None
        else "is not among the planner's first layouts"
    )
    yield (
        f"Predicted for {cluster.device_count} x {cluster.device.name}, {describe_plan(plan.job)} {place}. Compared "
        "with it:"
    )


def alternatives(run_plan: RunPlan) -> list[str]:
    plan = run_plan.estimate
    return [f"{describe_difference(plan, other)}." for other in run_plan.alternatives] if plan is not None else []


def measured_costs(report: Report) -> dict[str, float]:
    """The mean exposed seconds of a step on rank 0, divided by cause as the goodput account divides them."""
    steps = report.measurements.steps.get(0) if report.measurements is not None else None
    if report.history is None or steps is None or mean_of(steps.exposed) is None:
        return {}
    waits = divide_waits(report.history, steps)
    return {
        "exposed communication": float(np.mean(waits.communication)),
        "pipeline bubble": float(np.mean(waits.bubble)),
        "wait for a slow rank": float(np.mean(waits.straggler)),
    }


def measured_steps(report: Report) -> str:
    if not report.steps:
        return "No step was timed: the first two steps of an attempt and steps with counters are not."
    return f"Medians of {report.steps:,} steps of attempt {report.attempt}, without counters and without the first two:"


def measurement(report: Report, plan: Mapping[str, Any]) -> Iterator[str]:
    low, high = finite_number(plan.get("low")), finite_number(plan.get("high"))
    for section, figure in MEASURED_FIGURES:
        row = report.row(section, figure)
        if row is None:
            continue
        form = UNITS[row.unit]
        name = f"{figure[0].upper()}{figure[1:]}" if section != "pipeline" else "Idle share of pipeline ranks"
        name = "Peak memory of tensors" if section == "memory" else name
        measured = form(row.measured) if row.measured is not None else "not known"
        sentence = f"{name}: {measured}"
        if row.measured is None and row.note:
            sentence += f" ({row.note})"
        if row.predicted is not None:
            error = f", error {format_percent(row.error, 1, signed=True)}" if row.error is not None else ""
            sentence += f", predicted {form(row.predicted)}{error}"
        if figure == "step time" and report.within_interval is not None and low is not None and high is not None:
            inside = "within" if report.within_interval else "outside"
            sentence += f", {inside} the 80% interval {format_seconds(low)} to {format_seconds(high)}"
        yield f"{sentence}."
