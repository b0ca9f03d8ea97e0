"""Counts the bytes of tensors that the user's code allocates beyond those it was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.telemetry.memory_tracker import MemoryTracker


@dataclass
class AllocatedBytes:
    """Bytes beyond those of the given tensors: the largest number at any time, and the number at the end."""

    peak: int = 0
    at_end: int = 0


@contextmanager
def allocated_bytes(given: Iterable[Tensor]) -> Iterator[AllocatedBytes]:
    """Counts inside of a `with` block; the result is complete after it."""
    found = AllocatedBytes()
    with MemoryTracker(nn.Module()) as tracker:
        tracker.assign_class("buffer", given)
        start = tracker.total
        yield found
        found.peak, found.at_end = tracker.peak_total - start, tracker.total - start
