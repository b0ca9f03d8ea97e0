"""Data-bound steps: every rank waits for its samples, or some rank does in many steps. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.step_time.stragglers import find_period
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, TimedSteps, timed_steps

ONE_RANK = 2 / 3
"""Share of the stalls of one rank above which they are its own."""
CLEARLY = 2.0
"""Stalls in fetch take this many times what ranks differ by in any other phase."""
FILE_KINDS = ("tokens", "text", "jsonl", "chat", "shards")


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None or steps.config.rl.enabled:  # its steps wait for rollouts
        return
    total = float(steps.seconds.mean(axis=0).sum())
    fetch = steps.local["fetch"].min(axis=0)
    share = float(fetch.sum()) / total
    variant, why, change = cause(steps)
    if (stalled := random_stalls(steps)) is not None:
        lost, count = stalled
        yield Finding(
            "data",
            "random stalls",
            f"samples that take long stall one rank or another in {count} of {len(fetch)} steps, {lost / total:.0%} of "
            f"the step time, and the other ranks wait: {why}",
            lost / total,
            "medium",
            phase="fetch",
            evidence=(
                MeasuredFigure(
                    "seconds in fetch, slowest rank",
                    float(steps.local["fetch"].max(axis=0).mean()),
                    "s",
                    float(fetch.mean()),
                    "the rank that waits least",
                ),
                MeasuredFigure("steps with a stall", float(count), "count", float(len(fetch)), "all steps"),
            ),
            change=replace(change, predicted_seconds=(total - lost) / len(fetch), predicted_by="measured share"),
            check="meshwright diagnose RUN --try",
        )
    if share < LIMITING_SHARE:
        return
    typical = float(np.median(fetch))
    slow = np.flatnonzero(fetch > max(3 * typical, 0.5 * steps.duration))
    period = find_period(steps.steps[slow]) if len(slow) > 2 else 0
    when = f"every {period} steps " if period else ""
    yield Finding(
        "data",
        "periodic" if period else variant,
        f"{when}all ranks wait for their samples, {share:.0%} of the step time: {why}",
        share,
        "high" if share > 2 * LIMITING_SHARE else "medium",
        phase="fetch",
        evidence=(
            MeasuredFigure(
                "seconds in fetch, rank that waits least", float(fetch.mean()), "s", steps.duration, "the step"
            ),
            MeasuredFigure("samples per second and rank", steps.batch.local / steps.duration, "/s"),
            MeasuredFigure("loader workers per rank", float(steps.config.data.workers), "count"),
        ),
        change=change,
        check="meshwright diagnose RUN --try",
    )


def random_stalls(steps: TimedSteps) -> tuple[float, int] | None:
    """The seconds that steps take longer because a rank fetches longer than the others, and in how many steps; None if
    they are few, if they are those of one rank, which is a straggler, or noise, which every phase has.
    """
    own = steps.local_seconds()
    extra = {
        phase: own.max(axis=0) - (own - seconds + seconds.min(axis=0)).max(axis=0)
        for phase, seconds in steps.local.items()
    }
    stalls = extra.pop("fetch")
    lost, noise = float(stalls.sum()), max(float(seconds.sum()) for seconds in extra.values())
    by_rank = np.bincount(own.argmax(axis=0), stalls, len(steps.ranks))
    if lost < LIMITING_SHARE * float(steps.seconds.mean(axis=0).sum()) or lost < CLEARLY * noise:
        return None
    if float(by_rank.max()) > ONE_RANK * lost:
        return None
    return lost, int((stalls > stalls.max() / 2).sum())


def cause(steps: TimedSteps) -> tuple[str, str, Change]:
    """Where the time goes, as far as the settings tell: (variant, sentence, change)."""
    data = steps.config.data
    if data.workers == 0:
        return "loader", "samples are decoded in the training thread", Change(("data.workers = 2",))
    if data.worker_kind == "thread":
        return (
            "decode",
            f"{data.workers} worker threads share one interpreter lock",
            Change(('data.worker_kind = "process"', f"data.workers = {2 * data.workers}")),
        )
    kinds = {source.kind for source in (data.mixture or (data,))}
    if kinds & {"shards"} and not data.shard_cache:
        return "storage", "shards are read from their folder", Change(("data.shard_cache = 8_000_000_000",))
    return (
        "storage" if kinds & set(FILE_KINDS) else "loader",
        f"{data.workers} worker processes do not keep up",
        Change((f"data.workers = {2 * data.workers}", f"data.prefetch = {2 * data.prefetch}")),
    )
