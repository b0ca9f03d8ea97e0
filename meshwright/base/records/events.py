"""The events of a rank: append-only JSON lines, one record per line. Torch-free."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.base.io import open_descriptor, open_regular_file, write_error

Event = dict[str, Any]

EVENT_KINDS = (
    "start",
    "restored",
    "code_changed",
    "choices",
    "unfused_loss",
    "extended",
    "damaged",
    "step",
    "counters",
    "experts",
    "rollouts",
    "rollout_problem",
    "eval",
    "checkpoint",
    "save_failed",
    "snapshot",
    "snapshot_failed",
    "bad_sample",
    "nonfinite",
    "calibrated",
    "profile",
    "callback_failed",
    "output",
    "end",
    "straggler",
    "hang",
    "attempt_start",
    "attempt_end",
    "command_end",
    "events_lost",
)
"""Every kind of event that a run writes; `docs/records.md` lists their fields."""

MAX_LINE_BYTES = 1 << 20
"""Readers skip longer lines instead of loading them into memory: Meshwright does not write any."""


class EventLog:
    """Appends records. A torn last line, which a killed attempt left behind, is truncated first.

    A record that cannot be written, on a full disk for example, is lost and never ends the training. The first lost
    record is reported on standard error; the first record that can be written again follows an `events_lost` record.

    Args:
        path: the event file, in a folder that exists or in the folder `events` of a run folder that exists.
        attempt: the number of the attempt.
        rank: the rank that writes, or -1 for the supervisor.
        listener: called with every record, lost ones included.
        on_lost: called with the number of records that are lost and not yet on record.
    """

    def __init__(
        self,
        path: Path,
        attempt: int,
        rank: int,
        listener: Callable[[Event], None] | None = None,
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        self._path, self._listener, self._on_lost = path, listener, on_lost
        self._common: Event = {"attempt": attempt, "rank": rank}
        self._file: int | None = None
        self._lost = 0
        try:
            self._open()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise write_error(path, error) from None

    def _open(self) -> int:
        if self._file is None:
            with suppress(FileExistsError):
                self._path.parent.mkdir()
            self._file = open_descriptor(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            truncate_torn_line(self._file)
        return self._file

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one record of a kind in `EVENT_KINDS`, with the time (Unix seconds), in a single system call."""
        record = {"kind": kind, **self._common, "time": round(time.time(), 6), **fields}
        lines = [record]
        if self._lost:
            message = f"{self._lost} event(s) of rank {self._common['rank']} could not be written before this one"
            lines.insert(
                0,
                {
                    "kind": "events_lost",
                    **self._common,
                    "time": record["time"],
                    "count": self._lost,
                    "message": message,
                },
            )
        try:
            self._append("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
        except OSError as error:
            self._lose(error)
        else:
            self._set_lost(0)
        if self._listener is not None:
            self._listener(record)

    def _append(self, content: bytes) -> None:
        file = self._open()
        if (written := os.write(file, content)) < len(content):
            with suppress(OSError):
                remove_last_bytes(file, written)  # nothing but complete lines
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _lose(self, error: OSError) -> None:
        self._set_lost(self._lost + 1)
        if self._lost == 1:
            with suppress(OSError, ValueError):  # standard error may be a file on the same disk
                print(
                    f"meshwright: {self._path} cannot be written: {error.strerror}; the training continues, and events "
                    "are lost until it can be written again",
                    file=sys.stderr,
                    flush=True,
                )

    def _set_lost(self, count: int) -> None:
        if count != self._lost:
            self._lost = count
            if self._on_lost is not None:
                self._on_lost(count)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def remove_last_bytes(file: int, count: int) -> None:
    """Removes the bytes that this process has just appended, unless another process has appended something since."""
    end = os.lseek(file, 0, os.SEEK_CUR)  # appending moves it to the end of what was appended
    if os.fstat(file).st_size == end:
        os.ftruncate(file, end - count)


def truncate_torn_line(file: int) -> None:
    """Truncates a file after its last line end. What is too long for a torn line was not written by Meshwright: it
    stays, and is ended.
    """
    complete, size = complete_bytes(file), os.fstat(file).st_size
    if complete < size:
        os.ftruncate(file, complete)
    elif size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")


def complete_bytes(file: int) -> int:
    """Returns the number of bytes of a file up to its last line end, or all bytes if the last MAX_LINE_BYTES contain
    no line end.
    """
    size = end = os.fstat(file).st_size
    while end > max(0, size - MAX_LINE_BYTES):
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return size if end else 0


class EventFollower:
    """Reads an event file as it grows: each call of `new_events` yields the records completed since the last."""

    def __init__(self, path: Path, only_new: bool = False) -> None:
        self._path = path
        self._offset = 0
        if only_new:
            with suppress(OSError), open_regular_file(path) as file:
                self._offset = complete_bytes(file.fileno())
        self._partial = b""

    def new_events(self) -> Iterator[Event]:
        try:
            with open_regular_file(self._path) as file:
                file.seek(self._offset)
                while block := file.read(MAX_LINE_BYTES):
                    self._offset += len(block)
                    *lines, self._partial = (self._partial + block).split(b"\n")
                    yield from parse_lines(lines)
                    if len(self._partial) > MAX_LINE_BYTES:
                        self._partial = b""
        except OSError:  # no file yet, or something else than a regular file
            return


def read_events(path: Path) -> Iterator[Event]:
    """Yields every complete record of an event file."""
    yield from EventFollower(path).new_events()


def parse_lines(lines: list[bytes]) -> Iterator[Event]:
    """Yields the JSON objects among lines."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a torn line that no later attempt has truncated yet
        if isinstance(record, dict):
            yield record
