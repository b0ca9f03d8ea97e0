"""How long a call takes: the median of batches of calls, as many on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

BATCH = 0.005
"""Seconds of one batch, at least: calls shorter than the clock is sure of are timed together."""
MAX_CALLS = 2000
"""of one batch"""
MIN_BATCHES, MOST = 3, 25
"""batches"""
PATIENCE = 4.0
"""A call that would take more than so many times its share of the time is not made."""


@dataclass(frozen=True)
class TimingGroup:
    """The ranks that time something together, seen from one of them."""

    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """None: all ranks"""

    def reduce(self, value: float, slowest: bool) -> float:
        """The largest of the ranks' values, or their mean."""
        if self.ranks == 1:
            return value
        carried = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(carried, dist.ReduceOp.MAX if slowest else dist.ReduceOp.SUM, group=self.group)
        return float(carried) if slowest else float(carried) / self.ranks

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_calls(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of so many calls, one after the other."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def median_seconds(self, call: Callable[[], object], share: float, slowest: bool = False) -> float:
        """Seconds of one call: its median over batches that take about the share together. The slowest rank's counts,
        or the ranks' mean.
        """
        self.time_calls(call, 1)
        first = max(1e-9, self.reduce(self.time_calls(call, 1), slowest=True))
        calls = min(MAX_CALLS, max(1, int(BATCH / first)))
        batches = min(MOST, max(MIN_BATCHES, int(share / (calls * first))))
        took: list[float] = []
        start = time.monotonic()
        while len(took) < batches:
            spent = self.reduce(time.monotonic() - start, slowest=True)  # all begin together, and end together
            if spent > share and len(took) >= MIN_BATCHES:
                break
            took.append(self.time_calls(call, calls) / calls)
        return self.reduce(median(took), slowest)


class TimeBudget:
    """Time for several things, one after the other: what one of them leaves or overdraws is the next ones'."""

    def __init__(self, crew: TimingGroup, seconds: float, things: int) -> None:
        self._crew, self._end, self._things = crew, time.monotonic() + seconds, things

    def next_share(self) -> float:
        """The next one's, the same on every rank."""
        left = max(0.0, self._end - time.monotonic()) / max(1, self._things)
        self._things -= 1
        return self._crew.reduce(left, slowest=True)


def fits_budget(seconds: float, share: float) -> bool:
    """Whether a call of so many seconds can be timed in its share, or not much more."""
    return seconds * (MIN_BATCHES + 2) <= PATIENCE * share
