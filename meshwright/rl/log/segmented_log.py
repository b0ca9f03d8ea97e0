"""What readers of a rollout log have in common: scanning and reading over segments. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from meshwright.errors import DataError
from meshwright.rl.log.frames import RECORD_HEADER, SEGMENT_HEADER, InvalidHeader, digest_run_id
from meshwright.rl.log.interface import START, DamagedRecord, LogPosition, LogRecord
from meshwright.rl.log.segment import BLOCK_BYTES, RECORD_BYTES, Segment, TornTail


def segment_name(number: int) -> str:
    return f"{number:08d}.log"


def parse_segment_name(name: str) -> int | None:
    """The number of a segment from the name of its file; None for a name that no segment has."""
    digits = name.removesuffix(".log")
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 13 else 0
    return number if number and segment_name(number) == name else None


class SegmentedReader(ABC):
    """A `RolloutReader` over numbered segments."""

    grows = True
    """Whether the last segment may be the beginning of an append. An object is there whole or not at all."""

    def __init__(self, run_id: str) -> None:
        self.run = digest_run_id(run_id)

    @abstractmethod
    def segments(self) -> Sequence[int]:
        """The numbers of the segments, in order. One that was deleted may be among them, or may not."""

    @abstractmethod
    def segment_path(self, number: int) -> str:
        """The path or URL of a segment, for messages."""

    @abstractmethod
    def open_segment(self, number: int, block_bytes: int = BLOCK_BYTES) -> AbstractContextManager[Segment | None]:
        """A segment as far as it is written, or None if there is none. It is read by blocks of the given size."""

    def close(self) -> None:  # noqa: B027  a reader has nothing to close
        """Release what the log has open."""

    @property
    def end(self) -> LogPosition:
        for number in reversed(self.segments()):
            with self.open_segment(number) as segment:
                if segment is not None and not self.grows:
                    return segment.position(segment.size)
                if segment is not None and not segment.is_torn_creation:
                    return find_end(segment)[0]
        return START

    def scan(self, start: LogPosition | None = None) -> Iterator[LogRecord | DamagedRecord]:
        """See `RolloutReader.scan`. The log is that of the first record: what is appended later is not yielded."""
        start, known = start or START, self.segments()
        last = known[-1] if known else 0
        if start.segment > max(last, 1) or (not last and start > START):
            raise self.lost_records(start)
        expected = start.segment
        for number in known[bisect_left(known, start.segment) :]:
            with self.open_segment(number) as segment:
                if segment is None:
                    continue
                if number > expected:
                    yield self.missing_segments(expected, number)
                expected = number + 1
                if number == last and self.grows and segment.is_torn_creation:
                    if number == start.segment and start.offset > 0:
                        raise self.lost_records(start)
                    return
                if damaged := segment.check_header():
                    yield damaged
                first = start.offset if number == start.segment else 0
                if first > segment.size:
                    raise self.lost_records(start)
                for found in segment.records(first):
                    if not isinstance(found, TornTail):
                        yield found
                    elif number < last or not self.grows:  # a later segment begins only after an append is complete
                        yield found.damaged

    def read(self, position: LogPosition) -> bytes:
        path = self.segment_path(position.segment)
        hint = "expected a record that was acknowledged; try to restore the file from a backup"
        with self.open_segment(position.segment, RECORD_BYTES) as segment:
            if segment is None:
                raise DataError(f"{path} is missing: expected the record at offset {position.offset}", hint)
            if segment.size < position.offset + RECORD_HEADER.size or position.offset < SEGMENT_HEADER.size:
                raise DataError(
                    f"{path}: expected a record at offset {position.offset}, found {segment.size:,} bytes of records",
                    hint,
                )
            try:
                return segment.read_record(position.offset).payload
            except InvalidHeader as problem:
                raise DataError(f"{path}, offset {position.offset}: {problem}", hint) from None

    def missing_segments(self, first: int, stop: int) -> DamagedRecord:
        names = self.segment_path(first) + (
            f" and the {stop - first - 1} segments after it" if stop > first + 1 else ""
        )
        return DamagedRecord(LogPosition(first, 0), None, f"expected {names}, found none: deleted or lost")

    def lost_records(self, start: LogPosition) -> DataError:
        return DataError(
            f"{self.segment_path(start.segment)}: the rollout log ends before {start}; found its end at {self.end}",
            "records that were acknowledged are lost: try to restore the log from a backup, or --fresh",
        )


def find_end(segment: Segment) -> tuple[LogPosition, TornTail | None]:
    """Where the records of a segment end, and the torn tail that follows."""
    for found in segment.records(0):
        if isinstance(found, TornTail):
            return found.position, found
    return segment.position(max(segment.size, SEGMENT_HEADER.size)), None
