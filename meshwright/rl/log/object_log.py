"""The rollout log in an object store: one immutable object per append, rollouts/00000001.log and so on. Torch-free.

The numbers are consecutive, and an object is published only if its number is free. So two writers never both append
under a number: the one that is later loses, and appends nothing from then on. A listing only tells where to begin to
look for the last number; whether an object exists is asked for directly.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshwright.base.store.interface import Store
from meshwright.core.faults import fail_point
from meshwright.errors import BusyError, ConfigError
from meshwright.rl.log.frames import SEGMENT_HEADER, InvalidHeader, NewerFormat, SegmentHeader
from meshwright.rl.log.interface import DamagedRecord, LogPosition
from meshwright.rl.log.posix_log import encode_records, require_lengths
from meshwright.rl.log.segment import BLOCK_BYTES, Segment, read_error
from meshwright.rl.log.segmented_log import SegmentedReader, parse_segment_name, segment_name


class ObjectRolloutReader(SegmentedReader):
    """A `RolloutReader` of objects in a folder of a store."""

    grows = False

    def __init__(self, store: Store, folder: str, run_id: str) -> None:
        super().__init__(run_id)
        self.store, self.folder = store, folder
        self.known = 0
        """An object of this number exists, or existed."""

    def segments(self) -> range:
        """See `SegmentedReader.segments`. A search with growing steps from the last number that a listing shows."""
        try:
            listed = filter(None, map(parse_segment_name, self.store.list_names(self.folder)))
            present = max(listed, default=0)
            present, step = max(present, self.known), 1
            while self._exists(present + step):
                present, step = present + step, 2 * step
            absent = present + step
            while absent - present > 1:
                middle = (present + absent) // 2
                if self._exists(middle):
                    present = middle
                else:
                    absent = middle
        except OSError as error:
            raise read_error(self.segment_path(1), error) from None
        self.known = present
        return range(1, present + 1)

    def segment_name(self, number: int) -> str:
        return f"{self.folder}/{segment_name(number)}"

    def segment_path(self, number: int) -> str:
        return f"{getattr(self.store, 'url', getattr(self.store, 'root', ''))}/{self.segment_name(number)}"

    @contextmanager
    def open_segment(self, number: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Segment | None]:
        name = self.segment_name(number)
        try:
            block = self.store.read(name, 0, block_bytes)
            size = len(block) if len(block) < block_bytes else self.store.size(name)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise read_error(self.segment_path(number), error) from None

        def read_range(start: int, length: int) -> bytes:
            return self.store.read(name, start, length)

        yield Segment(self.segment_path(number), self.run, number, size or 0, read_range, block_bytes, block)

    def _exists(self, number: int) -> bool:
        return self.store.size(self.segment_name(number)) is not None


class ObjectRolloutLog(ObjectRolloutReader):
    """A `RolloutLog` of objects."""

    def __init__(self, store: Store, folder: str, run_id: str) -> None:
        super().__init__(store, folder, run_id)
        self.writer = secrets.token_bytes(16)
        self.process = os.getpid()
        self.appends = 0
        self.failed = False
        """Whether the answer to an append was lost, so that its object may appear."""
        self.open = True
        segments = self.segments()
        for number in (1, segments.stop - 1) if segments else ():  # a scan checks the ones between
            with self.open_segment(number) as segment:
                if segment is not None:
                    segment.check_header()
        self.last = segments.stop - 1
        self._end = super().end

    @property
    def end(self) -> LogPosition:
        return self._end

    @property
    def cut(self) -> tuple[DamagedRecord, ...]:
        """Nothing: an object is there whole or not at all."""
        return ()

    def append(self, payloads: Sequence[bytes]) -> list[LogPosition]:
        """See `RolloutLog.append`."""
        if not self.open or self.process != os.getpid():
            raise self._busy(self.last + 1, f"process {os.getpid()} is not the writer, or has closed the log")
        require_lengths(payloads)
        if not payloads:
            return []
        self.appends += 1
        while True:
            number = self.last + 1
            first = LogPosition(number, SEGMENT_HEADER.size)
            buffers, positions, end = encode_records(self.run, first, payloads)
            content = b"".join([SegmentHeader(self.run, number, self.writer).encode(), *buffers])
            try:
                fail_point("rollout.append", self.appends)
                published = self.store.publish_if_absent(self.segment_name(number), content)
            except OSError as error:
                self.failed = True
                raise self._write_error(number, error, len(payloads)) from None
            if published:
                break
            self._adopt(number)
        self.last, self._end, self.failed = number, end, False
        fail_point("rollout.committed", self.appends)
        return positions

    def close(self) -> None:
        self.open = False

    def _adopt(self, number: int) -> None:
        """Continue after an object that exists if an earlier append of this writer created it, whose answer was lost.
        Raises a BusyError if another writer created it. Such an object is never deleted: a later writer may have read
        it already.
        """
        try:
            content = self.store.read(self.segment_name(number), 0, SEGMENT_HEADER.size)
            own = self.failed and SegmentHeader.decode(content).writer == self.writer
        except OSError as error:
            raise read_error(self.segment_path(number), error) from None
        except (InvalidHeader, NewerFormat):
            own = False
        if not own:
            self.open = False
            raise self._busy(number, "another writer has published it")
        self.last = number

    def _busy(self, number: int, cause: str) -> BusyError:
        return BusyError(
            f"{self.segment_path(number)} cannot be appended to the rollout log: {cause}",
            "expected one writer; try to end the other job",
        )

    def _write_error(self, number: int, error: OSError, records: int) -> ConfigError:
        cause = error.strerror or type(error).__name__
        return ConfigError(
            f"{self.segment_path(number)} cannot be written: {cause}; {records} records are not acknowledged",
            "try again; the object store must be reachable and writable",
        )
