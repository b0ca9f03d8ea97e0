"""The share of a run's time that the end of attempts costs. Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.run_history import RunHistory


def share_lost(history: RunHistory, *attempts: AttemptHistory) -> float:
    """The share of the run's time that was lost by the end of these attempts: steps that were run again, and the time
    from the last step until the next attempt began its first one; 1.0 if there is no next one.
    """
    table = history.steps()
    started = [attempt.started for attempt in history.attempts if attempt.started is not None]
    ended = [attempt.ended for attempt in history.attempts if attempt.ended is not None]
    if not len(table) or not started or not ended:
        return 1.0
    lost = 0.0
    for attempt in attempts:
        rows, later = table.of_attempt(attempt.number), [a for a in history.attempts if a.number > attempt.number]
        if not later:
            return 1.0
        redone = rows.select(rows.step >= later[0].first_step)
        lost += float(np.nansum(redone.seconds))
        begins = table.of_attempt(later[0].number).begin
        last = float(rows.end[-1]) if len(rows) else attempt.ended
        if last is not None and len(begins):
            lost += max(0.0, float(begins[0]) - last)
    wall = max(ended) - min(started)
    return min(1.0, lost / wall) if wall > 0 else 1.0
