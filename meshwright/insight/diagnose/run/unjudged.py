"""Time of a run that no class of causes explains: between its steps, and in waits for the slowest rank. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.records.untrusted_records import WARMUP_STEPS
from meshwright.insight.diagnose.finding import UNJUDGED_SHARE, Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import Seconds, TimedSteps, common_rows

BETWEEN = {"evaluate": "evaluation", "save": "saves", "callback": "callbacks"}
"""Phase between two steps -> what a sentence calls it."""
OTHER, WAITS = "records and logging", "waits for the slowest rank"
TOGETHER = "several of these together"
"""What no part costs by itself, because another rank takes as long in another part."""
NEXT = {
    "evaluation": "evaluate more rarely (eval.every), or fewer samples (eval.samples)",
    "saves": "save more rarely (checkpoint.every, checkpoint.seconds), or look at the disk of the run folder",
    "callbacks": "let callbacks do their work every few steps, or in a thread of their own",
    OTHER: "look at what the loop does between steps: logging, trackers, and the disk of the run folder",
    TOGETHER: "the parts lie beside each other on different ranks: let all of them take less time",
    WAITS: "no rank is behind in most steps or at a period: look for other processes on the hosts, and at the samples",
}
"""Part of the time -> what to do about it."""
WAIT_CAUSES, WAIT_VARIANTS = ("straggler", "experts"), ("random stalls", "imbalance")
"""Causes, and kinds of other causes, that explain why ranks wait for another one."""
OWN_RATIO = 2.0
"""A rank is named if it takes this many times as long between steps as the others typically do."""


@dataclass(frozen=True)
class Periods:
    """Successive steps of all ranks, each with the time since the step before it. One row per rank."""

    seconds: Seconds
    """from the end of the previous step to the end of this one"""
    gap: Seconds
    """of these, those before the step begins"""
    local: Seconds
    """those of the step that the rank spends by itself"""
    parts: dict[str, Seconds]
    """what a sentence calls a part -> its seconds of the gap; together all of it"""

    @property
    def total(self) -> float:
        return float(self.seconds.mean(axis=0).sum())

    def between(self) -> dict[str, float]:
        """Seconds between steps that all ranks lose, by part. A step cannot be complete before the slowest rank is, so
        that a part costs as much as the slowest rank would end sooner without it, and no more than all of them do.
        """
        own = self.gap + self.local
        slowest = own.max(axis=0)
        parts = {name: float((slowest - (own - s).max(axis=0)).sum()) for name, s in self.parts.items()}
        whole, alone = float((slowest - self.local.max(axis=0)).sum()), sum(parts.values())
        if alone > whole:
            return {name: seconds * whole / alone for name, seconds in parts.items()} | {TOGETHER: 0.0}
        return parts | {TOGETHER: whole - alone}


def find_unjudged(history: RunHistory, steps: TimedSteps, found: Sequence[Finding]) -> Iterator[Finding]:
    """The time that no finding explains, if it is too much of the time for a verdict."""
    periods = read_periods(history, steps)
    if periods is None:
        return
    parts, total = periods.between(), periods.total
    if any(one.cause == "checkpoint" for one in found):
        parts.pop("saves")
    between = sum(parts.values()) / total
    behind = float(np.maximum(0.0, steps.above_peers(periods.local)).max(axis=0).sum())
    in_steps = 1 - float(periods.gap.mean(axis=0).sum()) / total  # the shares of findings are those of the step time
    explained = sum(one.share for one in found if one.cause in WAIT_CAUSES or one.variant in WAIT_VARIANTS)
    waits = max(0.0, behind / total - explained * in_steps)
    if between + waits <= UNJUDGED_SHARE:
        return
    shares = {name: seconds / total for name, seconds in parts.items()}
    names = sorted((name for name, share in shares.items() if share >= 0.01), key=lambda name: -shares[name])
    named = [f"{name} {shares[name]:.0%}" for name in names]
    if shares[TOGETHER] >= 0.01:
        present = [name for name, seconds in periods.parts.items() if seconds.mean(axis=0).sum() >= 0.01 * total]
        named.append(f"{named.pop(names.index(TOGETHER))}: {', '.join(present)}")
    rank = longest_rank(periods, steps) if between >= waits else None
    where = f", most of it on rank {rank}" if rank is not None else ""
    sentences = [f"{between:.0%} of the time is between steps ({', '.join(named)}){where}"] if named else []
    if waits >= 0.01:
        sentences.append(f"for {waits:.0%} of the time ranks wait for the slowest one")
    shares[WAITS] = waits
    largest = max(shares, key=lambda name: shares[name])
    count = periods.seconds.shape[1]
    yield Finding(
        "not judged",
        "waits" if largest == WAITS else "between steps",
        f"not judged: {'; '.join(sentences)}",
        between + waits,
        "low"
        if largest == WAITS
        else "medium",  # the place is known, the cause is not; a busy machine makes ranks wait
        rank=rank,
        evidence=tuple(
            MeasuredFigure(f"{name}, per step", share * total / count, "s", total / count, "step and what precedes it")
            for name, share in shares.items()
            if share >= 0.01
        ),
        change=Change(action=NEXT[largest]),
        check="meshwright report RUN",
    )


def read_periods(history: RunHistory, steps: TimedSteps) -> Periods | None:
    """The periods of the attempt that is judged, without its first steps; None if too few are on record."""
    tables = [history.steps(rank).of_attempt(steps.attempt).survived() for rank in steps.ranks]
    with_gaps = [with_previous(table) for table in tables]
    if (rows := common_rows([table for table, _ in with_gaps])) is None:
        return None
    kept = [np.isin(table.step, rows[0].step) for table, _ in with_gaps]
    gap = np.stack([gaps[mask] for (_, gaps), mask in zip(with_gaps, kept, strict=True)])
    parts = {name: np.nan_to_num(np.stack([row.outside[phase] for row in rows])) for phase, name in BETWEEN.items()}
    parts = {name: np.clip(seconds, 0.0, gap) for name, seconds in parts.items()}
    return Periods(
        gap + np.stack([row.seconds for row in rows]),
        gap,
        np.stack([row.local_seconds for row in rows]),
        parts | {OTHER: np.maximum(0.0, gap - np.sum(list(parts.values()), axis=0))},
    )


def with_previous(table: StepTable) -> tuple[StepTable, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """The steps whose previous one is on record, without the first steps, and the seconds since that one ended. On CUDA
    the host begins to queue a step before the previous one has ended: then nothing lies between them.
    """
    numbers, gaps = table.step, table.begin[1:] - table.end[:-1]
    known = (np.diff(numbers) == 1) & (numbers[1:] >= numbers[0] + WARMUP_STEPS) & np.isfinite(gaps)
    return table.select(slice(1, None)).select(known), np.maximum(0.0, gaps[known])


def longest_rank(periods: Periods, steps: TimedSteps) -> int | None:
    """The rank that takes much longer between steps than the others, if there is one."""
    seconds = periods.gap.sum(axis=1)
    row = int(np.argmax(seconds))
    others = np.delete(seconds, row)
    return steps.ranks[row] if len(others) and seconds[row] > OWN_RATIO * float(np.median(others)) else None
