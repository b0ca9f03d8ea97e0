"""Samples that are trained again: work that restarts redo, and positions that are read twice. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.insight.diagnose.finding import LIMITING_SHARE, Change, Finding, MeasuredFigure


def find(history: RunHistory) -> Iterator[Finding]:
    """The findings on replayed samples."""
    table = history.steps()
    if not len(table):
        return
    yield from find_lost_work(history, table)
    yield from find_repeated_positions(table.survived())


def find_lost_work(history: RunHistory, table: StepTable) -> Iterator[Finding]:
    """Steps that an attempt completed and a later one ran again."""
    survived = table.survived()
    redone = len(table) - len(survived)
    total = float(np.nansum(table.seconds))
    seconds = total - float(np.nansum(survived.seconds))
    if not redone or seconds < LIMITING_SHARE * total:
        return
    pairs = [
        (before, after)
        for before, after in zip(history.attempts, history.attempts[1:], strict=False)
        if after.first_step < before.done and after.steps_recorded is not None
    ]
    if not pairs:
        return
    before, after = max(pairs, key=lambda pair: pair[0].done - pair[1].first_step)
    lost = before.done - after.first_step
    samples = int(np.nansum(table.samples) - np.nansum(survived.samples))
    gone = newest_lost_checkpoint(history, before, after)
    attempts = f"{len(pairs)} restarts redo" if len(pairs) > 1 else "one restart redoes"
    yield Finding(
        "replay",
        "lost checkpoint" if gone else "lost work",
        f"{attempts} {redone} steps ({samples:,} samples); attempt {after.number} began again at step "
        f"{after.first_step}, {lost} steps before the end of attempt {before.number}"
        + (f", although the checkpoint of step {gone} had been published" if gone else ""),
        seconds / total,
        "high",
        step=after.first_step,
        evidence=(
            MeasuredFigure("steps that were trained again", redone, "count", float(len(survived)), "steps of the run"),
            MeasuredFigure("seconds of these steps", seconds, "s", total, "all steps"),
            MeasuredFigure("samples that were trained again", samples, "count"),
        ),
        change=Change(
            () if gone else (f"checkpoint.every = {max(1, lost // 2)}",),
            f"find out who deleted or damaged the checkpoint of step {gone}: meshwright checkpoint verify "
            f"{history.folder.root}"
            if gone
            else "a failure loses the steps since the newest checkpoint",
        ),
        check="meshwright checkpoint list RUN",
        survived=not gone,
    )


def newest_lost_checkpoint(history: RunHistory, before: AttemptHistory, after: AttemptHistory) -> int:
    """The newest checkpoint that existed when an attempt began, and that it did not restore; 0 if there is none."""
    steps = [c.step for c in history.checkpoints if c.attempt <= before.number and c.step > after.first_step]
    return max(steps, default=0)


def find_repeated_positions(survived: StepTable) -> Iterator[Finding]:
    """Positions of the stream that two surviving steps have read. Step k reads the global batch at k times its size, so
    that this happens only where a fork has made the batch smaller.
    """
    known = survived.select(np.isfinite(survived.samples) & (survived.samples > 0))
    if len(known) < 2:
        return
    first, end = known.step * known.samples, (known.step + 1) * known.samples
    furthest = np.maximum.accumulate(end)[:-1]
    repeated = np.clip(np.minimum(furthest, end[1:]) - first[1:], 0, None)
    if not (count := int(repeated.sum())):
        return
    step = int(known.step[1:][repeated > 0][0])
    yield Finding(
        "replay",
        "positions read twice",
        f"{count:,} positions of the stream are read twice, from step {step} on: the global batch changed from "
        f"{int(known.samples[0])} to {int(known.samples[-1])} samples by a fork",
        count / float(known.samples.sum()),
        "high",
        step=step,
        evidence=(MeasuredFigure("positions that are read twice", count, "count", 0.0, "expected"),),
        change=Change(
            (f"batch.global = {int(known.samples[0])}",), "a fork with the batch of the run continues its stream"
        ),
        check=f"meshwright data show RUN --step {step}",
    )
