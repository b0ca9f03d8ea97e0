"""The rollout log in files of a run folder: RUN/rollouts/00000001.log and so on. Torch-free.

One append is one write and one fsync, whatever the number of its records. The writer holds an exclusive lock; readers
need none, because records never change once they are acknowledged.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.base.io import open_descriptor, sync_folder
from meshwright.base.records.run_folder import require_kind
from meshwright.core.faults import fail_point
from meshwright.errors import LIMIT_HINTS, BusyError, ConfigError, DataError
from meshwright.rl.log.frames import MAX_RECORD_BYTES, SEGMENT_HEADER, RecordHeader, SegmentHeader
from meshwright.rl.log.interface import START, DamagedRecord, LogPosition
from meshwright.rl.log.segment import BLOCK_BYTES, Segment, read_error
from meshwright.rl.log.segmented_log import SegmentedReader, find_end, parse_segment_name, segment_name

LOCK_FILE = ".lock"
MAX_BUFFERS = 512
"""Buffers of one call of writev; Linux accepts 1,024."""


class PosixRolloutReader(SegmentedReader):
    """A `RolloutReader` of files. It opens a file for each use, so that processes and threads may share it."""

    def __init__(self, folder: Path, run_id: str) -> None:
        super().__init__(run_id)
        self.folder, self.prefix = folder, f"{folder}{os.sep}"  # joining paths would be a third of a read
        require_kind(folder, stat.S_ISDIR, "a folder")

    def segments(self) -> list[int]:
        try:
            return sorted(filter(None, map(parse_segment_name, os.listdir(self.folder))))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise read_error(str(self.folder), error) from None

    def segment_path(self, number: int) -> str:
        return f"{self.prefix}{segment_name(number)}"

    @contextmanager
    def open_segment(self, number: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Segment | None]:
        path = self.segment_path(number)
        try:
            file = open_descriptor(path, os.O_RDONLY)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise read_error(path, error) from None
        try:
            size = os.fstat(file).st_size

            def read_range(start: int, length: int) -> bytes:
                return read_all(file, start, length)

            yield Segment(path, self.run, number, size, read_range, block_bytes)
        finally:
            os.close(file)


class PosixRolloutLog(PosixRolloutReader):
    """A `RolloutLog` of files."""

    def __init__(self, folder: Path, run_id: str, segment_bytes: int) -> None:
        super().__init__(folder, run_id)
        self.segment_bytes = segment_bytes
        self.writer = secrets.token_bytes(16)
        self.file: int | None = None
        """The last segment, open for appending, or None if the next append creates one."""
        self.unfinished: int | None = None
        """The segment of an append that is being written, or that has failed and could not be undone."""
        self.appends = 0
        self.process = os.getpid()
        self._end = START
        self._cut: tuple[DamagedRecord, ...] = ()
        self._make_folder()
        self.lock = self._lock()
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        OPEN_LOGS.add(self)

    @property
    def end(self) -> LogPosition:
        return self._end

    @property
    def cut(self) -> tuple[DamagedRecord, ...]:
        return self._cut

    def append(self, payloads: Sequence[bytes]) -> list[LogPosition]:
        """See `RolloutLog.append`. If the write fails, the file is cut to where the log ended before."""
        self._require_writer()
        require_lengths(payloads)
        if not payloads:
            return []
        self.appends += 1
        self._undo_failed()
        create = self.file is None or self._end.offset >= self.segment_bytes
        first = self._next_segment() if create else self._end
        buffers, positions, end = encode_records(self.run, first, payloads)
        path = self.segment_path(first.segment)
        file = None if create else self.file
        try:
            fail_point("rollout.append", self.appends)
            if file is None:
                file = open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
                buffers.insert(0, SegmentHeader(self.run, first.segment, self.writer).encode())
            elif (size := os.fstat(file).st_size) != first.offset:
                raise DataError(
                    f"{path} was changed by another process: expected {first.offset:,} bytes, found {size:,}",
                    "expected one writer; try to end the other one",
                )
            self.unfinished = first.segment
            write_all(file, buffers)
            os.fsync(file)
            if create:
                sync_folder(self.folder)
        except BaseException as error:
            if create and file is not None:
                os.close(file)
            with suppress(OSError):  # the next append tries it again
                self._undo()
            if isinstance(error, OSError):
                raise self._write_error(path, error, len(payloads)) from None
            raise
        if create and self.file is not None:
            os.close(self.file)
        self.file, self._end, self.unfinished = file, end, None
        fail_point("rollout.committed", self.appends)
        return positions

    def close(self) -> None:
        """Release the lock. The log can be opened again."""
        OPEN_LOGS.discard(self)
        for file in (self.file, self.lock):
            if file is not None:
                os.close(file)
        self.file = self.lock = None

    def _make_folder(self) -> None:
        try:
            with suppress(FileExistsError):
                self.folder.mkdir()
            require_kind(self.folder, stat.S_ISDIR, "a folder")
            sync_folder(self.folder.parent)
        except OSError as error:
            raise self._write_error(str(self.folder), error) from None

    def _lock(self) -> int | None:
        path = self.folder / LOCK_FILE
        try:
            lock = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._write_error(str(path), error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = re.match(rb"[0-9]{1,10}(?=\n)", os.pread(lock, 32, 0))
            os.close(lock)
            name = f"process {holder[0].decode()}" if holder else "another process"
            raise BusyError(
                f"{self.folder} is in use: {name} appends to the rollout log",
                "expected one writer; try to end the other job",
            ) from None
        except OSError as error:
            os.close(lock)
            raise self._write_error(str(path), error) from None
        return lock

    def _open(self) -> None:
        """Check every segment, and cut the last one to its last whole record."""
        segments = self.segments()
        if segments:
            with self.open_segment(segments[-1]) as segment:
                if segment is not None and segment.is_torn_creation:
                    reason = f"expected the header of a segment, found {segment.size} bytes"
                    self._cut = (DamagedRecord(segment.position(0), segment.size, reason),)
                    self._remove(segments.pop())
        for number in segments:
            with self.open_segment(number) as segment:
                if segment is None:
                    continue
                segment.check_header()
                if number == segments[-1]:
                    self._open_last(segment)

    def _open_last(self, segment: Segment) -> None:
        self._end, torn = find_end(segment)
        try:
            self.file = open_descriptor(segment.name, os.O_WRONLY | os.O_APPEND)
            if torn is not None:
                self._cut += (torn.damaged,)
                os.ftruncate(self.file, self._end.offset)
            os.fsync(self.file)  # a record that was written but not acknowledged counts from now on
            sync_folder(self.folder)
        except OSError as error:
            raise self._write_error(segment.name, error) from None

    def _next_segment(self) -> LogPosition:
        return LogPosition(self._end.segment + (self._end > START), SEGMENT_HEADER.size)

    def _undo_failed(self) -> None:
        """Undo an append that failed before, if that was not possible then."""
        if self.unfinished is not None:
            try:
                self._undo()
            except OSError as error:
                raise self._write_error(self.segment_path(self.unfinished), error) from None

    def _undo(self) -> None:
        if self.unfinished is not None:
            if self.unfinished > self._end.segment or self._end == START:
                self._remove(self.unfinished)
            else:
                self._truncate()
            self.unfinished = None

    def _truncate(self) -> None:
        assert self.file is not None
        os.ftruncate(self.file, self._end.offset)
        os.fsync(self.file)

    def _remove(self, number: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.segment_path(number))
        sync_folder(self.folder)

    def _require_writer(self) -> None:
        if self.lock is None or self.process != os.getpid():
            raise BusyError(
                f"{self.folder}: process {os.getpid()} cannot append to the rollout log that process {self.process} "
                "has opened",
                "expected one writer, which has not closed the log",
            )

    def _write_error(self, path: str, error: OSError, records: int = 0) -> ConfigError:
        lost = f"; {records} records were not appended, and the log ends at {self._end} as before" if records else ""
        hint = LIMIT_HINTS.get(error.errno or 0, "try --run DIR with a writable folder, and the limits of ulimit -a")
        return ConfigError(f"{path} cannot be written: {error.strerror or type(error).__name__}{lost}", hint)


def require_lengths(payloads: Sequence[bytes]) -> None:
    """Raises a DataError for a payload that is too long, before anything is written."""
    for payload in payloads:
        if len(payload) > MAX_RECORD_BYTES:
            raise DataError(
                f"a record of {len(payload):,} bytes is too long for the rollout log",
                f"expected at most {MAX_RECORD_BYTES:,} bytes; try a smaller rl.group_size",
            )


def encode_records(
    run: bytes, first: LogPosition, payloads: Sequence[bytes]
) -> tuple[list[bytes], list[LogPosition], LogPosition]:
    """The buffers of some records, the position of each, and the position after the last."""
    buffers: list[bytes] = []
    positions, end = [], first
    for payload in payloads:
        header = RecordHeader.of_payload(run, end, payload)
        buffers += (header.encode(), payload)
        positions.append(end)
        end = LogPosition(end.segment, end.offset + header.size)
    return buffers, positions, end


def write_all(file: int, buffers: Sequence[bytes]) -> None:
    """Write the buffers in order; one system call unless there are many of them, or the disk takes only a part."""
    views = [memoryview(buffer) for buffer in buffers if buffer]
    while views:
        written = os.writev(file, views[:MAX_BUFFERS])
        count = 0
        while count < len(views) and written >= len(views[count]):
            written -= len(views[count])
            count += 1
        views = views[count:]
        if written:
            views[0] = views[0][written:]


def read_all(file: int, start: int, length: int) -> bytes:
    """Up to `length` bytes from `start`; fewer at the end of the file only."""
    blocks = []
    while length > 0 and (block := os.pread(file, length, start)):
        blocks.append(block)
        start, length = start + len(block), length - len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


OPEN_LOGS: weakref.WeakSet[PosixRolloutLog] = weakref.WeakSet()


def close_in_child() -> None:
    """A process that the writer forks must not keep the lock when the writer has died."""
    for log in list(OPEN_LOGS):
        log.close()


os.register_at_fork(after_in_child=close_in_child)
