"""A rank's events: append-only JSONL, one record a line, written whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

MAX_LINE_BYTES = 1 << 20
"""A longer line is not one of ours; a reader passes over it instead of taking it into memory."""


class EventLog:
    """Appends records; a torn last line, left by an attempt that was killed, is cut first."""

    def __init__(self, path: Path, attempt: int, rank: int, listener: Callable[[Event], None] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._common: Event = {"attempt": attempt, "rank": rank}
        self._listener = listener
        truncate_torn_line(self._file)

    def write(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, **self._common, **fields}
        os.write(self._file, (json.dumps(record, separators=(",", ":")) + "\n").encode())
        if self._listener is not None:
            self._listener(record)

    def close(self) -> None:
        os.close(self._file)


def truncate_torn_line(file: int) -> None:
    """Cuts whatever follows the last line end."""
    whole = complete_bytes(file)
    if whole != os.fstat(file).st_size:
        os.ftruncate(file, whole)


def complete_bytes(file: int) -> int:
    """How many bytes of a file are whole lines."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class EventFollower:
    """Reads an event file as it grows: each call gives the records completed since the last."""

    def __init__(self, path: Path, only_new: bool = False) -> None:
        self._path = path
        self._offset = 0
        if only_new and path.exists():
            with open(path, "rb") as file:
                self._offset = complete_bytes(file.fileno())
        self._rest = b""

    def new_events(self) -> Iterator[Event]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                while block := file.read(MAX_LINE_BYTES):
                    self._offset += len(block)
                    *lines, self._rest = (self._rest + block).split(b"\n")
                    yield from parse_lines(lines)
                    if len(self._rest) > MAX_LINE_BYTES:
                        self._rest = b""
        except FileNotFoundError:
            return


def read_events(path: Path) -> Iterator[Event]:
    """Every whole record of an event file."""
    yield from EventFollower(path).new_events()


def completed_steps(path: Path) -> dict[int, Event]:
    """The record of every step. Where several attempts made a step, the last that completed it counts."""
    return {event["step"]: event for event in read_events(path) if event.get("kind") == "step"}


def parse_lines(lines: list[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a torn line that a later attempt has not cut yet
        if isinstance(record, dict):
            yield record
