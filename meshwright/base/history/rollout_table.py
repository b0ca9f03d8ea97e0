"""The rollouts of a run of reinforcement learning: what each step measured of them, and their account. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.clean_events import EventList, InvalidField, clean_event, integer
from meshwright.base.history.rollout_counts import RolloutCounts
from meshwright.base.history.step_table import MAX_ROWS, RECENT_STEPS, finite_or_nan
from meshwright.base.records.events import Event
from meshwright.base.records.untrusted_records import bounded_object

METRICS = ("reward", "reward_std", "kl", "entropy", "clip_share", "staleness", "mismatch", "queue_depth")
"""The metrics of a step record that are kept."""
RECORDED = ("wait_seconds", "generators", "generator_idle_seconds", "generator_seconds")
"""The numbers of a `rollouts` record that are kept."""
MAX_BEGUN = 8
"""Records of begun steps that are kept: a step may be recorded after the next one has begun."""
COLUMNS = ("step", "attempt", "seconds", *METRICS, *RECORDED)
INDEX = {name: index for index, name in enumerate(COLUMNS)}

Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RolloutTable:
    """One row per completed step, in the order of recording; NaN is a value that was not recorded."""

    rows: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Column:
        """The column of a name in COLUMNS."""
        return self.rows[:, INDEX[name]]

    @property
    def step(self) -> NDArray[np.int64]:
        return self.column("step").astype(np.int64)

    def survived(self) -> RolloutTable:
        """One row per step, in order: the last attempt that completed it counts."""
        _, first = np.unique(self.column("step")[::-1], return_index=True)
        return RolloutTable(self.rows[len(self.rows) - 1 - first])

    def select(self, rows: Any) -> RolloutTable:
        """The rows of a slice, mask or list of indices."""
        return RolloutTable(self.rows[rows])

    def recent(self) -> RolloutTable:
        """The newest steps of the newest attempt."""
        newest = RolloutTable(self.rows[-RECENT_STEPS:])
        attempt = newest.column("attempt")
        return RolloutTable(newest.rows[attempt == attempt[-1]]) if len(newest) else newest

    @property
    def learner_idle_share(self) -> float | None:
        """The share of the step time in which the ranks wait for rollouts."""
        waits, seconds = self.column("wait_seconds"), self.column("seconds")
        known = ~np.isnan(waits) & (seconds > 0)
        return min(1.0, float(waits[known].sum() / seconds[known].sum())) if known.any() else None

    @property
    def generator_idle_shares(self) -> Column:
        """The share of their time in which generators waited for a permitted group, between each step and the one
        before. The recorded seconds are totals of a rollout service, which begin again with every command.
        """
        idle, total = self.column("generator_idle_seconds"), self.column("generator_seconds")
        spent, waited = np.diff(total, prepend=0.0), np.diff(idle, prepend=0.0)
        begins = (spent < 0) | (waited < 0)
        spent, waited = np.where(begins, total, spent), np.where(begins, idle, waited)
        shares: Column = np.divide(waited, spent, out=np.full(len(spent), nan), where=spent > 0)
        return shares.clip(max=1.0)

    @property
    def generator_idle_share(self) -> float | None:
        """The same over all rows."""
        if not len(self):
            return None
        idle, total = self.column("generator_idle_seconds"), self.column("generator_seconds")
        waited, spent = idle[-1] - idle[0], total[-1] - total[0]
        if len(self) == 1 or not (spent > 0 and waited >= 0):
            waited, spent = idle[-1], total[-1]
        return min(1.0, float(waited / spent)) if spent > 0 and not isnan(waited) else None


class RolloutHistory:
    """What the records of rank 0 say of rollouts. A `rollouts` record counts once its step is complete."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.problems = EventList()
        """the `rollout_problem` records"""
        self.counts: RolloutCounts | None = None
        """the account of the newest completed step"""
        self.max_staleness: int | None = None
        """the largest staleness of a rollout that was trained, over all steps"""
        self._max_rows = max_rows
        self._rows: list[list[float]] = []
        self._begun: dict[tuple[int, int], Event] = {}
        """(step, attempt) -> its `rollouts` record, of the newest steps that are not complete"""
        self._table: RolloutTable | None = None

    def __bool__(self) -> bool:
        """Whether the run trains on rollouts, as far as its records say."""
        return bool(self._rows) or bool(self._begun)

    @property
    def table(self) -> RolloutTable:
        if self._table is None:
            self._table = RolloutTable(np.array(self._rows, np.float64).reshape(-1, len(COLUMNS)))
        return self._table

    def receive(self, event: Event) -> None:
        """Takes a record of another kind than step; what is not one of rollouts is ignored."""
        if event.get("kind") == "rollout_problem":
            self.problems.keep(clean_event(event))
        elif event.get("kind") == "rollouts":
            try:
                key = step_key(event)
            except InvalidField:
                return
            self._begun.pop(key, None)
            self._begun[key] = event
            while len(self._begun) > MAX_BEGUN:
                del self._begun[next(iter(self._begun))]

    def receive_step(self, event: Event) -> None:
        """Takes a step record."""
        try:
            key = step_key(event)
        except InvalidField:
            return
        begun = self._begun.pop(key, None)
        if begun is None:
            return
        metrics = bounded_object(event.get("metrics"))
        self._rows.append(
            [
                *map(float, key),
                finite_or_nan(event.get("seconds")),
                *(finite_or_nan(metrics.get(name)) for name in METRICS),
                *(finite_or_nan(begun.get(name)) for name in RECORDED),
            ]
        )
        self._table = None
        if len(self._rows) > self._max_rows:
            newer = len(self._rows) - self._max_rows // 2
            self._rows = [*self._rows[:newer:2], *self._rows[newer:]]
        try:
            self.counts = RolloutCounts.from_json(begun.get("counts"))
            self.max_staleness = max(self.max_staleness or 0, integer(begun.get("staleness")))
        except (ValueError, InvalidField):
            return


def step_key(event: Event) -> tuple[int, int]:
    """(step, attempt) of an untrusted record. Raises InvalidField."""
    return integer(event.get("step")), integer(event.get("attempt"))
