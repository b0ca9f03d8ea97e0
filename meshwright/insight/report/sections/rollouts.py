"""The rollouts of a run of reinforcement learning, as a section of its report. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from meshwright.base.history.rollout_table import RolloutHistory, RolloutTable
from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_percent
from meshwright.insight.report.document import Curve, Section, Table
from meshwright.insight.report.pictures import make_bars
from meshwright.insight.report.sections.curves import draw_curve, extremes
from meshwright.insight.terminal.rollout_text import CAUSES, account_rows

CURVES: dict[str, tuple[str, Callable[[float], str], str]] = {
    "reward": ("reward", lambda value: f"{value:.4g}", "green"),
    "kl": ("KL divergence from the reference policy", lambda value: f"{value:.3g}", "violet"),
    "entropy": ("entropy per token", lambda value: f"{value:.3g}", "blue"),
    "staleness": ("staleness in steps", lambda value: f"{value:.3g}", "orange"),
    "clip_share": ("share of clipped tokens", lambda value: format_percent(value, 1), "teal"),
}
"""column -> (name, format, color)"""
FATE_CLASSES = {
    "trained": "green",
    "dropped, no_signal": "gold",
    "dropped, failed": "red",
    "dropped, stale": "orange",
    "dropped, lost_timeline": "pink",
    "dropped, duplicate": "violet",
    "dropped, damaged": "ink",
    "in flight": "sky",
}


def rollouts_section(history: RunHistory) -> Section | None:
    """Curves of the objective, the account of all rollouts, and who waits for whom; None for a run on samples."""
    rollouts = history.rollouts
    if not rollouts:
        return None
    table = rollouts.table.survived()
    if not len(table) or rollouts.counts is None:
        return Section("Rollouts", ["No step is complete."])
    restarts = {attempt.first_step: f"attempt {attempt.number}" for attempt in history.attempts[1:] if attempt.done}
    curves, rows = draw_curves(table, restarts)
    counts = rollouts.counts.to_json()
    parts = account_rows(counts)
    account = [
        [f"{sign} {part}".strip(), f"{amount:,}", f"{tokens:,}", CAUSES.get(part.removeprefix("dropped, "), "")]
        for sign, part, amount, tokens in parts
    ]
    amounts = {part: float(amount) for _, part, amount, _ in parts[1:] if amount}
    bars = make_bars("", {"rollouts": amounts}, FATE_CLASSES, lambda value: f"{value:,.0f}")
    tables = [
        Table(("account", "rollouts", "tokens", "meaning"), account, (0, 3)),
        Table(("", "first", "last", "smallest", "largest"), rows),
    ]
    notes = [f"A problem of the rollout service: {event['message'][:300]}" for event in rollouts.problems[-3:]]
    return Section("Rollouts", [*sentences(rollouts, table)], tables=tables, curves=curves, bars=[bars], notes=notes)


def sentences(rollouts: RolloutHistory, table: RolloutTable) -> Iterator[str]:
    assert rollouts.counts is not None
    share = rollouts.counts.trained.rollouts / max(1, rollouts.counts.generated.rollouts)
    yield (
        f"{format_percent(share, 1)} of {rollouts.counts.generated.rollouts:,} generated rollouts were trained, with a "
        f"staleness of at most {rollouts.max_staleness}."
    )
    sums = "generated = trained + dropped + in flight, for rollouts and for tokens"
    yield f"Every rollout is in one part: {sums}."  # counts that do not add up are not read
    learner, generators = table.learner_idle_share, table.recent().generator_idle_share
    if learner is not None and generators is not None:
        yield (
            f"The learner waited for rollouts in {format_percent(learner, 1)} of the step time, and generators for the "
            f"learner in {format_percent(generators, 1)} of the time of the newest steps."
        )


def draw_curves(table: RolloutTable, restarts: dict[int, str]) -> tuple[list[Curve], list[list[str]]]:
    """The curves of the columns that have values, and their first, last, smallest and largest values."""
    curves, rows = [], []
    for column, (name, form, css_class) in CURVES.items():
        values = table.column(column)
        curve = draw_curve(name, table, values, form, restarts, css_class)
        known = np.flatnonzero(np.isfinite(values))
        if curve is not None and len(known):
            curves.append(curve)
            ends = (form(float(values[index])) for index in (known[0], known[-1]))
            rows.append([name, *ends, *extremes(table, values, form)])
    return curves, rows
