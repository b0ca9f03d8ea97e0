"""The interface of the rollout log: positions, records, damage, and what a reader and a writer promise. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_NUMBER = 1 << 62


@dataclass(frozen=True, order=True)
class LogPosition:
    """Where a record begins, or where the log ends: the number of a segment, from 1, and an offset in bytes."""

    segment: int
    offset: int

    def to_json(self) -> list[int]:
        return [self.segment, self.offset]

    @classmethod
    def from_json(cls, value: Any) -> LogPosition:
        """Raises a ValueError for anything that `to_json` does not return."""
        if not (isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)):
            raise ValueError("a log position is not a list of a segment and an offset")
        if not (1 <= value[0] < MAX_NUMBER and 0 <= value[1] < MAX_NUMBER):
            raise ValueError("a log position has a number out of range")
        return cls(*value)

    def __str__(self) -> str:
        return f"segment {self.segment}, offset {self.offset}"


START = LogPosition(1, 0)
"""Before the first record."""


@dataclass(frozen=True)
class LogRecord:
    """An intact record."""

    position: LogPosition
    payload: bytes


@dataclass(frozen=True)
class DamagedRecord:
    """Bytes of the log that are not an intact record of this run at this position."""

    position: LogPosition
    length: int | None
    """how many bytes are damaged; None if it is not known, because a whole segment is missing"""
    reason: str
    """what is damaged, with the expected and the found value"""


class RolloutReader(Protocol):
    """Reads a rollout log. Any number of processes may read while one appends."""

    def read(self, position: LogPosition) -> bytes:
        """The verified payload of the record at a position. Raises a DataError that names the file, the offset, and the
        expected and the found value.
        """
        ...

    def scan(self, start: LogPosition | None = None) -> Iterator[LogRecord | DamagedRecord]:
        """Every record that is in the log now, in order, from `start` on. After damage the scan continues at the next
        intact record. An append that is being written is not part of the log. Raises a DataError if the log ends before
        `start`, or if a file belongs to another run or has a newer format.
        """
        ...

    @property
    def end(self) -> LogPosition:
        """Where the log ends: a scan from here yields the records that are appended later."""
        ...

    def close(self) -> None: ...


class RolloutLog(RolloutReader, Protocol):
    """Reads a rollout log and appends to it. A log has one writer."""

    @property
    def cut(self) -> tuple[DamagedRecord, ...]:
        """The incomplete append of an earlier writer that was removed when the log was opened, if there was one."""
        ...

    def append(self, payloads: Sequence[bytes]) -> list[LogPosition]:
        """Append records and return their positions once all of them are durable.

        If it raises, none of the records is acknowledged. In files, none is in the log. In an object store, a request
        whose answer was lost may still succeed: its records are then in the log, between the `end` before the call and
        the position of the next record, and a scan from that `end` yields them.
        """
        ...
