"""Counts the bytes of tensors that the user's code allocates beyond those it was given."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.core.telemetry.memory_tracker import MemoryTracker

SETTLE = 1.0


@dataclass
class AllocatedBytes:
    """Bytes beyond those of the given tensors: the largest number at any time, and the number at the end."""

    peak: int = 0
    at_end: int = 0


@contextmanager
def allocated_bytes(given: Iterable[Tensor], at_most: int = 0) -> Iterator[AllocatedBytes]:
    """Counts inside a `with` block; the result is complete after it.

    A thread of Gloo may release a tensor a little after its message has arrived. If more than `at_most` bytes remain,
    they get SETTLE seconds; and a limit of the peak should leave room for a few messages.
    """
    found = AllocatedBytes()
    with MemoryTracker(nn.Module()) as tracker:
        tracker.assign_class("buffer", given)
        start = tracker.total
        yield found
        deadline = time.monotonic() + SETTLE
        while tracker.total - start > at_most and time.monotonic() < deadline:
            time.sleep(0.01)
        found.peak, found.at_end = tracker.peak_total - start, tracker.total - start
