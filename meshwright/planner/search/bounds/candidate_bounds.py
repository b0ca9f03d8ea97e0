"""Lower bounds of the step time and the memory of candidates that differ in schedule and shard groups only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from meshwright.base.topology.layout import Layout
from meshwright.planner.search.bounds.memory_bounds import ActivationBytes, MemoryBounds, RankPeaks, least_bytes
from meshwright.planner.search.bounds.time_bounds import ExecutionSeconds, TimeBounds, least_seconds
from meshwright.planner.search.candidate import Candidate, CandidateJob


class CandidateBounds:
    """The bounds of candidates that share a sharding, a micro-batch and a trainer. What they share is computed once.
    `correction` is the factor that runs taught, or None without runs.
    """

    def __init__(
        self,
        each: CandidateJob,
        time: TimeBounds,
        memory: MemoryBounds,
        correction: Callable[[Candidate, str], float] | None,
    ) -> None:
        self.each, self.time, self.memory, self.correction = each, time, memory, correction
        self._seconds: dict[tuple[str, int], ExecutionSeconds] = {}
        self._peaks: dict[tuple[str, int], tuple[RankPeaks, ...]] = {}

    @cached_property
    def activations(self) -> ActivationBytes:
        return self.memory.activation_bytes(self.each)

    def factor(self, schedule: str, stages: int, layout: Layout, quantity: str) -> float:
        """The correction factor of a quantity, "seconds" or "memory"."""
        if self.correction is None:
            return 1.0
        return self.correction(self.each.member(schedule, stages, layout), quantity)

    def least_seconds(self, schedule: str, stages: int, layout: Layout) -> float:
        """A lower bound of the step time."""
        key = schedule, stages
        if (execution := self._seconds.get(key)) is None:
            execution = self._seconds[key] = self.time.execution(self.each, schedule, stages)
        bound = least_seconds(execution, self.time.unit(self.each, layout))
        return bound * self.factor(schedule, stages, layout, "seconds")

    def least_memory(self, schedule: str, stages: int, layout: Layout) -> float:
        """A lower bound of the memory."""
        key = schedule, stages
        if (ranks := self._peaks.get(key)) is None:
            ranks = self._peaks[key] = self.memory.rank_peaks(self.each, schedule, stages)
        bound = least_bytes(ranks, self.activations, self.memory.state_bytes(self.each, stages, layout))
        return bound * min(1.0, self.factor(schedule, stages, layout, "memory"))
