"""Times a call on several ranks at once: the median over batches of calls, with the same number of calls per rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

MIN_BATCH_SECONDS = 0.005
"""Calls that are shorter than this are timed together in one batch, because the clock has limited resolution."""
MAX_CALLS = 2000
"""Limit on the calls of one batch."""
MIN_BATCHES, MAX_BATCHES = 3, 25
"""Limits on the number of timed batches."""
MAX_OVERRUN = 4.0
"""A call is skipped if timing it would take more than this multiple of its share of the time budget."""


@dataclass(frozen=True)
class TimingGroup:
    """The ranks that time a call together, as seen from one of them."""

    ranks: int
    """number of ranks"""
    device: torch.device
    """the device of this rank"""
    group: dist.ProcessGroup | None = None
    """the process group of the ranks; None is the default group"""

    def reduce(self, value: float, slowest: bool) -> float:
        """All-reduces a value over the ranks: the maximum if `slowest`, else the mean."""
        if self.ranks == 1:
            return value
        reduced = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(reduced, dist.ReduceOp.MAX if slowest else dist.ReduceOp.SUM, group=self.group)
        return float(reduced) if slowest else float(reduced) / self.ranks

    def synchronize(self) -> None:
        """Waits until the device has finished all launched kernels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_calls(self, call: Callable[[], object], calls: int) -> float:
        """Returns the seconds of so many consecutive calls."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def median_seconds(self, call: Callable[[], object], share: float, slowest: bool = False) -> float:
        """Returns the seconds of one call: the median over batches that together take about `share` seconds.

        The result is that of the slowest rank if `slowest`, else the mean over the ranks.
        """
        self.time_calls(call, 1)
        first = max(1e-9, self.reduce(self.time_calls(call, 1), slowest=True))
        calls = min(MAX_CALLS, max(1, int(MIN_BATCH_SECONDS / first)))
        batches = min(MAX_BATCHES, max(MIN_BATCHES, int(share / (calls * first))))
        seconds: list[float] = []
        start = time.monotonic()
        while len(seconds) < batches:
            elapsed = self.reduce(time.monotonic() - start, slowest=True)  # all ranks time the same number of batches
            if elapsed > share and len(seconds) >= MIN_BATCHES:
                break
            seconds.append(self.time_calls(call, calls) / calls)
        return self.reduce(median(seconds), slowest)


class TimeBudget:
    """A time budget for several consecutive measurements; unused or overdrawn time carries over to the next ones."""

    def __init__(self, group: TimingGroup, seconds: float, measurements: int) -> None:
        self._group, self._end, self._remaining = group, time.monotonic() + seconds, measurements

    def next_share(self) -> float:
        """Returns the seconds of the next measurement, the same on every rank."""
        share = max(0.0, self._end - time.monotonic()) / max(1, self._remaining)
        self._remaining -= 1
        return self._group.reduce(share, slowest=True)


def fits_budget(seconds: float, share: float) -> bool:
    """Whether a call of so many seconds can be timed within its share of the budget, or not much more."""
    return seconds * (MIN_BATCHES + 2) <= MAX_OVERRUN * share
