"""Sets of disjoint time intervals as arrays of starts and ends: union, intersection, difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.insight.diagnose.trace.kineto.event_table import Floats, Mask


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in ascending order."""

    start: Floats
    end: Floats

    @classmethod
    def union(cls, start: Floats, end: Floats) -> Intervals:
        """Merges intervals that overlap or touch; empty ones are dropped."""
        kept = end > start
        start, end = start[kept], end[kept]
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, reached = start[order], np.maximum.accumulate(end[order])
        first = np.concatenate(([True], start[1:] > reached[:-1]))
        return cls(start[first], reached[np.concatenate((first[1:], [True]))])

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> float:
        return float((self.end - self.start).sum())

    def clip(self, low: float, high: float) -> Intervals:
        start, end = np.clip(self.start, low, high), np.clip(self.end, low, high)
        return Intervals(start[end > start], end[end > start])

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.union(np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end)))

    def __and__(self, other: Intervals) -> Intervals:
        """The times that are in both."""
        times = np.concatenate((self.start, self.end, other.start, other.end))
        change = np.repeat([1, -1, 1, -1], [len(self), len(self), len(other), len(other)])
        order = np.lexsort((change, times))  # at the same time an interval ends before another one starts
        times, depth = times[order], np.cumsum(change[order])
        both = np.flatnonzero(depth[:-1] == 2) if len(depth) else np.empty(0, int)
        return Intervals.union(times[both], times[both + 1])

    def __sub__(self, other: Intervals) -> Intervals:
        """The times that are in this and not in the other."""
        return self & other.gaps(float("-inf"), float("inf"))

    def gaps(self, low: float, high: float) -> Intervals:
        """The times between `low` and `high` that are not in this."""
        start, end = np.concatenate(([low], self.end)), np.concatenate((self.start, [high]))
        start, end = np.clip(start, low, high), np.clip(end, low, high)
        return Intervals(start[end > start], end[end > start])

    def select(self, mask: Mask) -> Intervals:
        return Intervals(self.start[mask], self.end[mask])

    def overlap_with(self, other: Intervals) -> Floats:
        """The time of each interval that is also in `other`."""
        covered = np.concatenate(([0.0], np.cumsum(other.end - other.start)))

        def before(time: Floats) -> Floats:
            position = np.searchsorted(other.start, time, side="right")
            last = np.maximum(position - 1, 0)
            beyond = np.maximum(other.end[last] - time, 0.0) if len(other) else np.zeros(len(time))
            return np.asarray(covered[position] - np.where(position > 0, beyond, 0.0))

        return before(self.end) - before(self.start)

    def contains(self, times: Floats) -> Mask:
        """Whether each time is within an interval."""
        position = np.searchsorted(self.start, times, side="right") - 1
        return (
            (position >= 0) & (times < self.end[np.maximum(position, 0)]) if len(self) else np.zeros(len(times), bool)
        )
