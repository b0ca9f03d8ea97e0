"""The goodput account: every second of a run's wall time is productive or has a cause. Torch-free.

The account divides the time line of rank 0, in integer nanoseconds, so that the parts add up to the wall time exactly.
`docs/watch.md` defines the parts.
"""

from __future__ import annotations

import numpy as np

from meshwright.base.history.account import PARTS, AttemptAccount, GoodputAccount
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_parts import divide_steps, survives
from meshwright.base.history.time_line import TimeLine

__all__ = ["PARTS", "AttemptAccount", "GoodputAccount", "goodput"]


def goodput(history: RunHistory, now: float) -> GoodputAccount:
    """The account of a run; of one that runs, until `now` (Unix seconds)."""
    table = history.steps()
    weights, kept, numbers = divide_steps(history, table), survives(history, table), table.attempt
    line = TimeLine(history, now)
    last = history.measured_attempt
    for attempt in history.attempts:
        if last is not None and attempt.number > last.number:
            break  # a later command has found the run complete
        rows = np.flatnonzero(numbers == attempt.number)
        line.add_attempt(attempt, table.select(rows), weights[rows], kept[rows])
    if history.is_restarting(now):
        line.fill("restart", now)
    samples = table.samples * table.multiplicity
    return GoodputAccount(line.accounts, float(np.nansum(samples[kept])), line.notes)
