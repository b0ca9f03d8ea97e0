"""The curves of a run over its steps, in bins that keep the smallest and largest value. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import DecimatedSteps, StepTable
from meshwright.insight.watch.page.answers import shorten
from meshwright.insight.watch.page.rollouts import describe_rollout_curves

POINTS = (50, 800)
"""The smallest and the largest number of bins."""
MAX_MARKS = 200
MAX_EVALUATIONS = 500
WAITING = "waiting for other ranks"
"""`sync`, and the waits inside the other phases."""


def describe_curves(history: RunHistory, points: int, first: int | None, last: int | None) -> dict[str, Any]:
    """Loss, gradient norm, throughput and phases of the steps from `first` to before `last`, on rank 0."""
    table = select_steps(history.steps().survived(), first, last)
    points = max(POINTS[0], min(points, POINTS[1]))
    bins = table.decimated(points)
    return {
        "range": [int(table.step[0]), int(table.step[-1]) + 1] if len(table) else [0, 0],
        "rows": len(table),
        "step": bins.step.tolist(),
        "loss": describe_column(bins, "loss"),
        "grad_norm": describe_column(bins, "grad_norm"),
        "throughput": describe_throughput(table, bins),
        "phases": describe_phases(bins.mean),
        "rollouts": describe_rollout_curves(history, points, first, last),
        "attempts": [
            {"number": one.number, "step": one.first_step}
            for one in history.attempts[-MAX_MARKS:]
            if one.steps_recorded or one.restored  # else it is not known yet where the attempt begins
        ],
        "evaluations": [[event["step"], event["loss"]] for event in history.evaluations[-MAX_EVALUATIONS:]],
    }


def select_steps(table: StepTable, first: int | None, last: int | None) -> StepTable:
    """The rows of the steps from `first` to before `last`; None is the beginning or the end."""
    low = 0 if first is None else int(np.searchsorted(table.step, first))
    high = len(table) if last is None else int(np.searchsorted(table.step, last))
    return table.select(slice(low, max(low, high)))


def describe_column(bins: DecimatedSteps, name: str) -> dict[str, list[float | None]]:
    parts = {"low": bins.low, "mean": bins.mean, "high": bins.high}
    return {part: shorten(table.column(name), 5) for part, table in parts.items()}


def describe_throughput(table: StepTable, bins: DecimatedSteps) -> dict[str, list[float | None]]:
    """Tokens per second of step time: over each bin, and of its slowest and fastest step."""
    if not len(table):
        return {"low": [], "mean": [], "high": []}
    rates = table.tokens / table.seconds
    starts = np.searchsorted(table.step, bins.step)
    mean = bins.mean.tokens / bins.mean.seconds
    return {
        "low": shorten(np.fmin.reduceat(rates, starts)),
        "mean": shorten(mean),
        "high": shorten(np.fmax.reduceat(rates, starts)),
    }


def describe_phases(mean: StepTable) -> dict[str, list[float | None]]:
    """Mean seconds of every phase per bin, without the waits inside of it, which are a row of their own."""
    waiting: NDArray[np.float64] = np.nan_to_num(mean.phases["sync"])
    for seconds in mean.waits.values():
        waiting = waiting + np.nan_to_num(seconds)
    phases = {name: shorten(seconds) for name, seconds in mean.local.items()}
    return phases | {WAITING: shorten(waiting)}
