"""What is kept of the trace of one rank after its events are released."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshwright.insight.diagnose.trace.breakdown import Breakdown, RankTimeline
from meshwright.insight.diagnose.trace.collective_calls import CollectiveCalls, collective_calls
from meshwright.insight.diagnose.trace.intervals import Intervals

MAX_STEPS = 200
"""Steps of a trace that are looked at one by one."""


@dataclass(frozen=True)
class RankSummary:
    """The times of one rank that are compared with those of other ranks."""

    rank: int
    header: dict[str, Any]
    breakdown: Breakdown
    windows: dict[int, tuple[float, float]]
    """step -> the times between which its activities run, in microseconds"""
    steps: dict[int, Breakdown]
    """step -> its breakdown, of the first MAX_STEPS"""
    compute: Intervals
    calls: CollectiveCalls

    @property
    def first_windows(self) -> list[tuple[float, float]]:
        return list(islice(self.windows.values(), MAX_STEPS))

    @property
    def step_count(self) -> int:
        return max(1, len(self.windows))


def summarize(timeline: RankTimeline, rank: int) -> RankSummary:
    """Computes the breakdowns and the collectives of a rank."""
    steps = {number: timeline.breakdown(*window) for number, window in islice(timeline.steps.items(), MAX_STEPS)}
    whole = timeline.breakdown(*timeline.window)
    return RankSummary(
        rank, timeline.trace.header, whole, timeline.steps, steps, timeline.compute, collective_calls(timeline)
    )
