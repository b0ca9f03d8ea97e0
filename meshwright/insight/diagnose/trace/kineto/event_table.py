"""The events of one trace as NumPy columns, with interned names, and the arguments of its collectives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from meshwright.insight.diagnose.trace.kineto.collective_args import CollectiveArgs, parse_collective_args

MAX_EVENTS = 8_000_000
"""Events that are kept of one trace; each takes 33 bytes."""
MAX_NAMES = 1 << 17
"""Different names that are kept; later ones are all called OTHER."""
MAX_NAME = 512
"""Bytes that are kept of a name: that of a kernel contains its template arguments."""
MAX_COLLECTIVES = 200_000
"""Collectives whose arguments are kept."""
OTHER = b"(other)"
MAX_TIME = 1e18
"""Microseconds; a time stamp beyond it is not valid."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Kind(IntEnum):
    """What an event describes, from its category."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    RUNTIME = 3
    ANNOTATION = 4
    OPERATOR = 5


KINDS = {
    b"kernel": Kind.KERNEL,
    b"gpu_memcpy": Kind.MEMCPY,
    b"memcpy": Kind.MEMCPY,
    b"gpu_memset": Kind.MEMSET,
    b"memset": Kind.MEMSET,
    b"cuda_runtime": Kind.RUNTIME,
    b"cuda_driver": Kind.RUNTIME,
    b"hip_runtime": Kind.RUNTIME,
    b"xpu_runtime": Kind.RUNTIME,
    b"runtime": Kind.RUNTIME,
    b"user_annotation": Kind.ANNOTATION,
    b"cpu_op": Kind.OPERATOR,
    b"operator": Kind.OPERATOR,
}
"""Category in lower case -> kind. The spelling has changed between versions of Kineto."""

Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]
"""category, name, communication prefix of the name, process, thread, start, duration, correlation, arguments of a
collective; what is absent is empty"""


@dataclass
class EventTable:
    """Columns of equal length, in the order of the file. Times are in microseconds."""

    start: Floats
    duration: Floats
    kind: NDArray[np.int8]
    name: NDArray[np.int32]
    thread: NDArray[np.int32]
    """index into `threads`; a device activity has its stream here"""
    correlation: Ints
    """links a device activity to the runtime call that launched it; -1 if there is none"""
    names: list[str]
    threads: list[tuple[str, str]]
    collectives: dict[int, CollectiveArgs] = field(default_factory=dict)
    """row -> arguments"""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Floats:
        return self.start + self.duration

    @property
    def is_device(self) -> Mask:
        return self.kind <= Kind.MEMSET

    def named(self, pattern: str) -> Mask:
        """Selects the events whose name contains a match of `pattern`."""
        search = re.compile(pattern).search
        return np.fromiter((search(name) is not None for name in self.names), bool, len(self.names))[self.name]


class Interned(dict[bytes, int]):
    """Numbers distinct keys in the order of their appearance, up to a limit."""

    def __missing__(self, key: bytes) -> int:
        kept = key[:MAX_NAME] if len(self) < MAX_NAMES else OTHER
        number = self.get(kept, len(self))
        self[kept] = number
        return number


class TableBuilder:
    """Collects rows into columns of bounded size."""

    def __init__(self) -> None:
        self.kinds, self.names, self.threads = Interned(), Interned(), Interned()
        self.columns: list[tuple[NDArray[np.generic], ...]] = []
        self.collectives: dict[int, CollectiveArgs] = {}
        self.rows = 0
        self.invalid = 0
        """events whose times are not valid"""

    @property
    def is_full(self) -> bool:
        return self.rows >= MAX_EVENTS

    def add(self, rows: Sequence[Row]) -> None:
        """Adds events whose times are numbers; those with an impossible time are counted and left out."""
        if not rows:
            return
        count = len(rows)
        category, name, _, process, thread, start, duration, correlation, args = zip(*rows, strict=True)
        starts = np.fromiter(map(float, start), np.float64, count)
        durations = np.fromiter(map(float, duration), np.float64, count)
        valid = (abs(starts) < MAX_TIME) & (durations >= 0) & (durations < MAX_TIME)  # False for NaN
        columns = (
            starts,
            durations,
            np.fromiter(map(self.kinds.__getitem__, category), np.int32, count),
            np.fromiter(map(self.names.__getitem__, name), np.int32, count),
            np.fromiter(
                map(self.threads.__getitem__, map(b"\0".join, zip(process, thread, strict=True))), np.int32, count
            ),
            np.array([int(text) if text else -1 for text in correlation], np.int64),
        )
        if not valid.all():
            self.invalid += int(count - valid.sum())
            columns = tuple(column[valid] for column in columns)  # type: ignore[assignment]
        if any(args) and len(self.collectives) < MAX_COLLECTIVES:
            position = np.cumsum(valid) - 1 + self.rows
            for row, text in enumerate(args):
                if valid[row] and (b'"In' in text or b'"Collective name"' in text):  # message sizes, or all metadata
                    self.collectives[int(position[row])] = parse_collective_args(text)
        self.columns.append(columns)
        self.rows += len(columns[0])

    def build(self) -> EventTable:
        """Joins the columns, one at a time, and empties the builder."""
        dtypes = (np.float64, np.float64, np.int32, np.int32, np.int32, np.int64)
        parts = [list(column) for column in zip(*self.columns, strict=True)] or [[] for _ in dtypes]
        self.columns.clear()
        joined = []
        for part, dtype in zip(parts, dtypes, strict=True):
            joined.append(np.concatenate([np.empty(0, dtype), *part]).astype(dtype, copy=False))
            part.clear()
        start, duration, category, name, thread, correlation = joined
        kinds = np.array([KINDS.get(text.lower(), Kind.OPERATOR) for text in self.kinds], np.int8)
        return EventTable(
            start,
            duration,
            kinds[category],
            name,
            thread,
            correlation,
            [decoded(text) for text in self.names],
            [tuple(decoded(text).split("\0", 1)) for text in self.threads],  # type: ignore[misc]
            self.collectives,
        )


def decoded(text: bytes) -> str:
    """The text of a string in a trace, without its escapes."""
    string = text.decode("utf-8", "replace")
    if "\\" in string:
        try:
            string = json.loads(f'"{string}"', strict=False)
        except ValueError:  # an escape was cut
            string = string.replace("\\", "")
    return string.replace('"', "")
