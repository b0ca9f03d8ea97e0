"""Reads the event file of one rank: steps as a table with running totals, other records as events. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.event_tail import EventTail
from meshwright.base.history.step_table import MAX_ROWS, StepRows, StepTable
from meshwright.base.records.events import Event
from meshwright.base.records.untrusted_records import parse_event

FULL_BYTES = 128 << 20
"""Of a larger file of rank 0, a part of the steps is kept, and the newest ones in full."""
NEWEST_STEPS = 2048
"""The newest steps, which are kept in any case."""
NEWEST_BYTES = NEWEST_STEPS * 768
"""Bytes of a rank's file that contain its newest steps."""
OTHER_RANKS_BYTES = 48 << 20
"""Bytes that are read of all other ranks in full; of larger files the newest steps and samples are read."""
SAMPLES = 256
"""Places of a large file at which a step is read."""
MAX_STEP_LINE_BYTES = 16 << 10
STEP = b'{"kind":"step",'

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 300.0)
"""Upper bounds of the buckets of the step time."""


@dataclass
class StepTotals:
    """Sums over every step that was read. They never fall while a run is followed."""

    steps: int = 0
    tokens: float = 0.0
    samples: float = 0.0
    skipped: int = 0
    seconds: float = 0.0
    buckets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(STEP_SECONDS) + 1, np.int64))
    """steps up to every bound of STEP_SECONDS, and all steps"""

    def add(self, new: StepTable) -> None:
        """Adds the steps of a table."""
        self.steps += len(new)
        self.tokens += float(np.nansum(new.tokens))
        self.samples += float(np.nansum(new.samples))
        self.skipped += int(new.skipped.sum())
        self.seconds += float(new.seconds.sum())
        self.buckets += np.searchsorted(np.sort(new.seconds), (*STEP_SECONDS, np.inf), side="right")


def ignore(_event: Event) -> None:
    """Takes a record that nobody reads."""


class RankSteps:
    """The steps of one rank as far as they were kept; `update` reads what was appended, and passes on other records."""

    def __init__(self, path: Path, rank: int, ranks: int = 1) -> None:
        self.rank = rank
        self.totals = StepTotals()
        self._tail = EventTail(path)
        self._rows = StepRows(2 * NEWEST_STEPS if rank else MAX_ROWS)
        self._started = False
        self._bytes = max(NEWEST_BYTES, OTHER_RANKS_BYTES // max(1, ranks)) if rank else 0
        try:
            self._stride = 1 + path.lstat().st_size // FULL_BYTES
        except OSError:
            self._stride = 1

    @property
    def table(self) -> StepTable:
        return self._rows.table()

    def update(self, receive: Callable[[Event], None], receive_step: Callable[[Event], None] = ignore) -> StepTable:
        """Reads what was appended since the last call, and returns the steps in it. `receive_step` takes the records
        of the steps that are kept, in full.
        """
        lines = self._tail.new_lines()
        if not self._started:
            lines = self._first_lines()
        for line in lines:
            self._add(line, receive, receive_step)
        self._started = True
        new = self._rows.take_new()
        self.totals.add(new)
        return new

    def _first_lines(self) -> Iterator[bytes]:
        """Yields the lines that are read of the file as it is found."""
        sampled = False
        if self.rank:
            for line in self._tail.sampled_lines(self._bytes, SAMPLES):
                sampled = True
                yield line
        stride = self._stride if self.rank == 0 else 0 if sampled else 1
        lines = self._tail.new_lines()
        yield from lines if stride == 1 else thinned(lines, stride)

    def _add(self, line: bytes, receive: Callable[[Event], None], receive_step: Callable[[Event], None]) -> None:
        if line.startswith(STEP) and len(line) > MAX_STEP_LINE_BYTES:
            return
        event = parse_event(line)
        if event is None:
            return
        if event.get("kind") != "step":
            receive(event)
        else:
            self._rows.append(event)
            receive_step(event)


def thinned(lines: Iterator[bytes], stride: int) -> Iterator[bytes]:
    """Yields every line but some steps: one in `stride` (none if it is 0), and the newest ones, remain."""
    newest: deque[bytes] = deque()
    count = 0
    for line in lines:
        if not line.startswith(STEP):
            yield line
            continue
        newest.append(line)
        if len(newest) > NEWEST_STEPS:
            oldest, count = newest.popleft(), count + 1
            if stride and count % stride == 1:
                yield oldest
    yield from newest
