"""Reads the records of one segment, which is untrusted, and continues after damage. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.errors import DataError
from meshwright.rl.log.frames import (
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_HEADER,
    InvalidHeader,
    NewerFormat,
    RecordHeader,
    SegmentHeader,
)
from meshwright.rl.log.interface import DamagedRecord, LogPosition, LogRecord

BLOCK_BYTES = 1 << 20
"""How much is read at once while a segment is scanned; a longer record is read alone."""
RECORD_BYTES = 1 << 15
"""How much is read at once for one record."""
WRITER_OFFSET = SEGMENT_HEADER.size - 24
"""Where the writer is in the header of a segment: what comes before is the same for every writer."""


@dataclass(frozen=True)
class TornTail:
    """The end of a segment that is the beginning of an append."""

    position: LogPosition
    length: int
    reason: str

    @property
    def damaged(self) -> DamagedRecord:
        return DamagedRecord(self.position, self.length, self.reason)


@dataclass
class Segment:
    """A segment of a log, as far as it was written when it was opened."""

    name: str
    """path or URL, for messages"""
    run: bytes
    number: int
    size: int
    read_range: Callable[[int, int], bytes]
    """reads up to a length from an offset"""
    block_bytes: int = BLOCK_BYTES
    block: bytes = b""
    block_start: int = 0

    def take(self, start: int, length: int) -> bytes:
        """Up to `length` bytes from `start`; fewer at the end of the segment. Reads by blocks."""
        length = max(0, min(length, self.size - start))
        inner = start - self.block_start
        if inner >= 0 and inner + length <= len(self.block):
            return self.block[inner : inner + length]
        fetched = max(length, min(self.block_bytes, self.size - start))
        try:
            content = self.read_range(start, fetched)
        except OSError as error:
            raise read_error(self.name, error) from None
        if len(content) < fetched:  # the writer has undone an append meanwhile
            self.size = start + len(content)
        if length < self.block_bytes:
            self.block_start, self.block = start, content
        return content[:length]

    def position(self, offset: int) -> LogPosition:
        return LogPosition(self.number, offset)

    @property
    def is_torn_creation(self) -> bool:
        """Whether the segment ends within its header, as when the writer was killed while it created the segment."""
        content = self.take(0, SEGMENT_HEADER.size)
        expected = SegmentHeader(self.run, self.number, bytes(16)).encode()
        common = min(len(content), WRITER_OFFSET)
        return len(content) < SEGMENT_HEADER.size and content[:common] in (expected[:common], bytes(common))

    def check_header(self) -> DamagedRecord | None:
        """The damage of the segment's header, if its records show that it is a segment of this run.

        Raises:
            DataError: the file is of another run, of a newer format, another segment, or no rollout log.
        """
        content = self.take(0, SEGMENT_HEADER.size)
        try:
            header = SegmentHeader.decode(content)
        except NewerFormat as problem:
            raise DataError(f"{self.name}: {problem}", "try a newer release of Meshwright") from None
        except InvalidHeader as problem:
            if self.find_header(min(SEGMENT_HEADER.size, self.size)) is None:
                raise DataError(
                    f"{self.name} is not a rollout log: {problem}",
                    "try to restore the file from a backup; if it is no file of the run, remove it",
                ) from None
            return DamagedRecord(self.position(0), SEGMENT_HEADER.size, str(problem))
        if header.run != self.run:
            raise DataError(
                f"{self.name} is the rollout log of another run: expected run {self.run.hex()}, found "
                f"{header.run.hex()}",
                "expected the rollout log that this run has written",
            )
        if header.segment != self.number:
            raise DataError(
                f"{self.name} is a copy of another segment: expected segment {self.number}, found {header.segment}",
                "expected the rollout log that this run has written",
            )
        return None

    def read_header(self, offset: int) -> RecordHeader:
        """The header of the record at an offset. Raises InvalidHeader unless it belongs there."""
        header = RecordHeader.decode(self.take(offset, RECORD_HEADER.size))
        header.require_place(self.run, self.position(offset))
        return header

    def read_record(self, offset: int) -> LogRecord:
        """The record at an offset. Raises InvalidHeader unless it is intact and belongs there."""
        header = self.read_header(offset)
        payload = self.take(offset + RECORD_HEADER.size, header.length)
        header.require_payload(payload)
        return LogRecord(self.position(offset), payload)

    def find_header(self, start: int) -> int | None:
        """The offset of the next record of this run and place, from `start` on."""
        while start < self.size:
            block = self.take(start, self.block_bytes // 2)
            found = block.find(RECORD_MAGIC)
            while found >= 0:
                try:
                    self.read_header(start + found)
                    return start + found
                except InvalidHeader:
                    found = block.find(RECORD_MAGIC, found + 1)
            # a magic may continue in the next block; at the end of the segment nothing is left to find
            start += max(len(block) - len(RECORD_MAGIC) + 1, 1)
        return None

    def records(self, start: int) -> Iterator[LogRecord | DamagedRecord | TornTail]:
        """Every record from an offset on. Damage extends to the next record of this run and place.

        A tail is torn, not damaged, if it may be the beginning of an append: it is shorter than a header, it is shorter
        than its intact header says, or it is zero, as after a power loss. Everything else may have been acknowledged.
        """
        offset = max(start, SEGMENT_HEADER.size)
        while offset < self.size:
            try:
                header = self.read_header(offset)
            except InvalidHeader as problem:
                following = self.find_header(offset + 1)
                if following is None and self.is_torn(offset):
                    yield TornTail(self.position(offset), self.size - offset, str(problem))
                    return
                end = self.size if following is None else following
                yield DamagedRecord(self.position(offset), end - offset, str(problem))
                offset = end
                continue
            end = offset + header.size
            if end > self.size:
                reason = f"expected a record of {header.size:,} bytes, found {self.size - offset:,}"
                following = self.find_header(offset + 1)
                if following is None:
                    yield TornTail(self.position(offset), self.size - offset, reason)
                    return
                yield DamagedRecord(self.position(offset), following - offset, reason)
                offset = following
                continue
            payload = self.take(offset + RECORD_HEADER.size, header.length)
            if len(payload) < header.length:
                continue
            try:
                header.require_payload(payload)
                yield LogRecord(self.position(offset), payload)
            except InvalidHeader as problem:
                yield DamagedRecord(self.position(offset), header.size, str(problem))
            offset = end

    def is_torn(self, offset: int) -> bool:
        """Whether the rest of the segment, without an intact header, is incomplete or zero."""
        if self.size - offset < RECORD_HEADER.size:
            return True
        while offset < self.size:
            block = self.take(offset, self.block_bytes // 2)
            if not block or block.count(0) != len(block):
                return False
            offset += len(block)
        return True


def read_error(name: str, error: OSError) -> DataError:
    cause = error.strerror or type(error).__name__
    return DataError(f"{name} cannot be read: {cause}", "expected the rollout log that the run has written")
