"""Loss, gradient norm and throughput over the steps of a run, as a section of its report. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from meshwright.base.history.rollout_table import RolloutTable
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import Column, StepTable
from meshwright.base.io import format_count
from meshwright.insight.report.document import Curve, Section, Table
from meshwright.insight.report.pictures import make_curve

BINS = 400
"""The points of a curve."""
CURVES: dict[str, tuple[str, Callable[[float], str], str]] = {
    "loss": ("loss", lambda value: f"{value:.4g}", "blue"),
    "grad_norm": ("gradient norm", lambda value: f"{value:.3g}", "violet"),
    "rate": ("throughput", lambda value: f"{format_count(value)}/s", "green"),
}
"""key -> (name, format, color)"""


def curves_section(history: RunHistory) -> Section:
    """Loss, gradient norm and throughput over the steps that the run keeps."""
    table = history.steps().survived()
    restarts = {attempt.first_step: f"attempt {attempt.number}" for attempt in history.attempts[1:] if attempt.done}
    curves, rows = [], []
    for key, (name, form, css_class) in CURVES.items():
        values = values_of(table, key)
        curve = draw_curve(name, table, values, form, restarts, css_class)
        known = np.flatnonzero(np.isfinite(values))
        if curve is not None and len(known):
            curves.append(curve)
            rows.append(
                [name, *(form(float(values[index])) for index in (known[0], known[-1])), *extremes(table, values, form)]
            )
    if not curves:
        return Section("Curves", ["No step is on record."])
    notes = ["Dashed lines: " + ", ".join(f"{name} from step {step:,}" for step, name in restarts.items()) + "."]
    evaluations = [event for event in history.evaluations if event["loss"] is not None]
    tables = [Table(("", "first", "last", "smallest", "largest"), rows)]
    if evaluations:
        newest = [[f"{event['step']:,}", f"{event['loss']:.4g}"] for event in evaluations[-8:]]
        tables.append(Table(("evaluation at step", "held-out loss"), newest))
    return Section("Curves", tables=tables, curves=curves, notes=notes if restarts else [])


def values_of(table: StepTable, key: str) -> Column:
    return table.tokens / table.seconds if key == "rate" else table.column(key)


def extremes(table: StepTable | RolloutTable, values: Column, form: Callable[[float], str]) -> Iterator[str]:
    """The smallest and the largest value, with their steps."""
    for index in (int(np.nanargmin(values)), int(np.nanargmax(values))):
        yield f"{form(float(values[index]))} (step {table.step[index]:,})"


def draw_curve(
    name: str,
    table: StepTable | RolloutTable,
    values: Column,
    form: Callable[[float], str],
    restarts: Mapping[int, str],
    css_class: str,
) -> Curve | None:
    """Draws values in at most BINS bins of equally many steps."""
    if not len(table):
        return None
    starts = np.unique(np.linspace(0, len(values), BINS, endpoint=False).astype(np.int64))
    known = np.isfinite(values)
    finite = np.where(known, values, np.nan)
    counts = np.add.reduceat(known, starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    bins = np.fmin.reduceat(finite, starts), mean, np.fmax.reduceat(finite, starts)
    return make_curve(name, table.step[starts].astype(np.float64), bins, form, restarts, css_class)
