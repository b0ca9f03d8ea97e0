"""The rollouts of a run of reinforcement learning as the page shows them: their account, and curves. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.rollout_table import RolloutTable
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.untrusted_records import bounded_object, natural_number
from meshwright.insight.terminal.rollout_text import CAUSES
from meshwright.insight.watch.page.answers import shorten

CURVES = ("reward", "kl", "entropy", "staleness", "clip_share")
"""Columns that have a curve, if they have a value."""


def describe_rollouts(history: RunHistory) -> dict[str, Any] | None:
    """The account of the newest step, and who waits for whom; None for a run that trains on samples."""
    rollouts = history.rollouts
    if not rollouts:
        return None
    recent, settings = rollouts.table.recent(), bounded_object(history.config.get("rl"))
    newest = rollouts.table.rows[-1:]
    generators = float(RolloutTable(newest).column("generators")[0]) if len(newest) else None
    return {
        "task": str(settings.get("task", ""))[:100],
        "staleness_bound": natural_number(settings.get("staleness")),
        "max_staleness": rollouts.max_staleness,
        "generators": generators,
        "generator_idle": recent.generator_idle_share,
        "learner_idle": recent.learner_idle_share,
        "counts": rollouts.counts.to_json() if rollouts.counts is not None else None,
        "causes": CAUSES,
        "problems": [event["message"] for event in rollouts.problems[-3:]],
    }


def describe_rollout_curves(
    history: RunHistory, points: int, first: int | None, last: int | None
) -> dict[str, Any] | None:
    """Reward, KL, entropy, staleness and clip share over the steps; None for a run that trains on samples."""
    if not history.rollouts:
        return None
    table = history.rollouts.table.survived()
    low = 0 if first is None else int(np.searchsorted(table.step, first))
    high = len(table) if last is None else int(np.searchsorted(table.step, last))
    table = table.select(slice(low, max(low, high)))
    starts = np.unique(np.linspace(0, len(table), points, endpoint=False).astype(np.int64))[: len(table)]
    described: dict[str, Any] = {"step": table.step[starts].tolist()}
    for name in CURVES:
        values = table.column(name)
        described[name] = bin_values(values, starts) if np.isfinite(values).any() else None
    return described


def bin_values(values: NDArray[np.float64], starts: NDArray[np.int64]) -> dict[str, list[float | None]]:
    """The smallest, mean and largest value of every bin."""
    known = np.isfinite(values)
    counts = np.add.reduceat(known, starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return {
        "low": shorten(np.fmin.reduceat(values, starts), 5),
        "mean": shorten(mean, 5),
        "high": shorten(np.fmax.reduceat(values, starts), 5),
    }
