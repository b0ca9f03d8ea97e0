"""Data-bound steps: every rank waits for its samples. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.step_time.stragglers import find_period
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, TimedSteps, timed_steps

FILE_KINDS = ("tokens", "text", "jsonl", "chat", "shards")


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None or steps.config.rl.enabled:  # its steps wait for rollouts
        return
    fetch = steps.local["fetch"].min(axis=0)  # one slow rank is a straggler
    share = float(fetch.sum() / steps.seconds.mean(axis=0).sum())
    if share < LIMITING_SHARE:
        return
    typical = float(np.median(fetch))
    stalled = np.flatnonzero(fetch > max(3 * typical, 0.5 * steps.duration))
    period = find_period(steps.steps[stalled]) if len(stalled) > 2 else 0
    variant, why, change = cause(steps)
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
