"""Checkpoint stalls: training waits for saves that are synchronous, frequent or on a slow disk. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.config import CheckpointConfig
from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, timed_steps

SLOW_DISK = 100e6
"""Bytes per second of a save below which the disk is slow."""
RARER = 4
"""How many times as long the interval between saves becomes."""
USUAL_SECONDS = 300.0
"""Seconds between time-triggered saves that lose little work to a failure and cost little time."""
SMALL_SAVE = 1.0
"""Seconds of a save, below which its bytes per second say little about the disk."""


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None:
        return
    saves = [one for one in history.checkpoints if one.attempt == steps.attempt and one.seconds]
    table = history.steps().of_attempt(steps.attempt)
    wall = float(table.end[-1] - table.begin[0])
    stall = float(np.nansum(table.outside["save"]))
    if not saves or not wall > 0 or stall / wall < LIMITING_SHARE:
        return
    share = stall / wall
    seconds = float(np.median([one.seconds or 0.0 for one in saves]))
    rate = float(np.median([(one.bytes or 0.0) / (one.seconds or 1.0) for one in saves]))
    slow = rate < SLOW_DISK and seconds > SMALL_SAVE
    config = steps.config.checkpoint
    if config.mode == "sync":
        settings: tuple[str, ...] = ('checkpoint.mode = "async"',)
    else:
        settings = rarer_saves(config)
    change = Change(
        settings,
        "look at the disk of the run folder" if slow else "",
        predicted_seconds=(wall - stall) / len(table),
        predicted_by="measured share",
    )
    variant = "slow disk" if slow else "synchronous saves" if config.mode == "sync" else "frequent saves"
    why = f"a save takes {seconds:.1f} s for {np.median([one.bytes or 0.0 for one in saves]) / 1e6:.1f} MB"
    yield Finding(
        "checkpoint",
        variant,
        f"training waits {share:.0%} of the time for checkpoints: {why}"
        + (", and the disk is slow" if slow else f" (checkpoint.mode = {config.mode})"),
        share,
        "high",
        step=saves[0].step,
        phase="save",
        evidence=(
            MeasuredFigure("seconds that training waited for saves", stall, "s", wall, "the attempt"),
            MeasuredFigure("bytes per second of a save", rate, "B/s", SLOW_DISK, "a slow disk"),
            MeasuredFigure("saves", float(len(saves)), "count", float(len(table)), "steps"),
        ),
        change=change,
        check="meshwright diagnose RUN --try",
    )


def rarer_saves(config: CheckpointConfig) -> tuple[str, ...]:
    """Longer intervals of every trigger that is in use."""
    by_step = (f"checkpoint.every = {RARER * config.every}",) if config.every else ()
    by_time = (f"checkpoint.seconds = {max(USUAL_SECONDS, RARER * config.seconds)}",) if config.seconds else ()
    return by_step + by_time
