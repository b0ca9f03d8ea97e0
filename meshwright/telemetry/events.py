"""The events of a rank: append-only JSON lines, one record per line. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

EVENT_KINDS = (
    "start",
    "restored",
    "extended",
    "damaged",
    "step",
    "counters",
    "experts",
    "eval",
    "checkpoint",
    "save_failed",
    "bad_sample",
    "nonfinite",
    "calibrated",
    "end",
    "straggler",
    "hang",
)
"""Every kind of event that a run writes; `docs/records.md` lists their fields."""

MAX_LINE_BYTES = 1 << 20
"""Readers skip longer lines instead of loading them into memory: Meshwright does not write any."""


class EventLog:
    """Appends records. A torn last line, which a killed attempt left behind, is truncated first."""

    def __init__(self, path: Path, attempt: int, rank: int, listener: Callable[[Event], None] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._common: Event = {"attempt": attempt, "rank": rank}
        self._listener = listener
        truncate_torn_line(self._file)

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one record of a kind in `EVENT_KINDS`, in a single system call."""
        record = {"kind": kind, **self._common, **fields}
        os.write(self._file, (json.dumps(record, separators=(",", ":")) + "\n").encode())
        if self._listener is not None:
            self._listener(record)

    def close(self) -> None:
        os.close(self._file)


def truncate_torn_line(file: int) -> None:
    """Truncates a file after its last line end."""
    complete = complete_bytes(file)
    if complete != os.fstat(file).st_size:
        os.ftruncate(file, complete)


def complete_bytes(file: int) -> int:
    """Returns the number of bytes of a file up to its last line end."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class EventFollower:
    """Reads an event file as it grows: each call of `new_events` yields the records completed since the last."""

    def __init__(self, path: Path, only_new: bool = False) -> None:
        self._path = path
        self._offset = 0
        if only_new and path.exists():
            with open(path, "rb") as file:
                self._offset = complete_bytes(file.fileno())
        self._partial = b""

    def new_events(self) -> Iterator[Event]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                while block := file.read(MAX_LINE_BYTES):
                    self._offset += len(block)
                    *lines, self._partial = (self._partial + block).split(b"\n")
                    yield from parse_lines(lines)
                    if len(self._partial) > MAX_LINE_BYTES:
                        self._partial = b""
        except FileNotFoundError:
            return


def read_events(path: Path) -> Iterator[Event]:
    """Yields every complete record of an event file."""
    yield from EventFollower(path).new_events()


def completed_steps(path: Path) -> dict[int, Event]:
    """Returns the record of every step; where several attempts completed a step, the last one counts."""
    return {event["step"]: event for event in read_events(path) if event.get("kind") == "step"}


def parse_lines(lines: list[bytes]) -> Iterator[Event]:
    """Yields the JSON objects among lines."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a torn line that no later attempt has truncated yet
        if isinstance(record, dict):
            yield record
