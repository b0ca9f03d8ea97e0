"""Reads event files as they grow: complete lines only, within bounds, and large files in part. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from meshwright.base.io import open_regular_file
from meshwright.base.records.events import MAX_LINE_BYTES

MAX_FILE_BYTES = 1 << 30
"""Bytes that are read of one file at most, from its end."""
SAMPLE_BYTES = 4 << 10
"""Bytes of one sample of a file that is read in part."""


class FileReplaced(Exception):
    """A file that was read before has become shorter or is another one: the folder has a new run."""


class EventTail:
    """Each call of `new_lines` yields the lines that were completed since the last call.

    Only complete lines are consumed: a torn last line is truncated by the next attempt, which then writes over it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0

    def new_lines(self) -> Iterator[bytes]:
        try:
            with open_regular_file(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._offset or self._inode not in (0, status.st_ino):
                    raise FileReplaced
                self._inode = status.st_ino
                self._offset = max(self._offset, status.st_size - MAX_FILE_BYTES)
                file.seek(self._offset)
                while block := file.read(MAX_LINE_BYTES):
                    complete = block.rfind(b"\n") + 1
                    if not complete and len(block) == MAX_LINE_BYTES:
                        complete = len(block)  # a part of a longer line, which is skipped: no record ends like this
                        lines: list[bytes] = []
                    else:
                        lines = block[:complete].split(b"\n")[:-1]
                    if not complete:
                        return
                    self._offset += complete
                    file.seek(self._offset)
                    yield from lines
        except OSError:  # no file yet, or something else than a regular file
            return

    def sampled_lines(self, tail_bytes: int, samples: int) -> Iterator[bytes]:
        """Yields, on the first call for a large file, a line at each of `samples` places of equal distance, then the
        lines of the last `tail_bytes`. `new_lines` continues from there.
        """
        try:
            with open_regular_file(self.path) as file:
                status = os.fstat(file.fileno())
                start = status.st_size - tail_bytes
                if start <= samples * SAMPLE_BYTES:
                    return
                for number in range(samples):
                    file.seek(start * number // samples)
                    # The first line is torn, unless it is the first of the file; the last one is, in any case.
                    lines = file.read(SAMPLE_BYTES).split(b"\n")[(1 if number else 0) : -1]
                    yield from lines[:1]
                file.seek(start)
                torn = file.readline(MAX_LINE_BYTES)
                self._offset, self._inode = start + len(torn), status.st_ino
        except OSError:
            return
