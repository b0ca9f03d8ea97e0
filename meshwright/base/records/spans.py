"""The spans of a rank: one JSON line per step, with the time of every phase, wait and pipeline action. Torch-free.

Spans are always on and bounded: a file that reaches MAX_BYTES becomes the older of two, and the previous older one is
replaced. What cannot be written, on a full disk for example, is lost: spans never end a training.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.base.io import open_descriptor
from meshwright.base.records.events import Event, remove_last_bytes, truncate_torn_line

MAX_BYTES = 32 << 20
"""Size at which a file of spans is rotated; a rank has at most two."""


def older_file(path: Path) -> Path:
    """The file that spans are moved to when the newer one is full."""
    return path.with_suffix(".1.jsonl")


class SpanLog:
    """Appends spans. The first line of an attempt, and of every file, is a `rank` record.

    Args:
        path: the file of the newer spans, in the folder `trace` of a run folder that exists.
        attempt: the number of the attempt.
        rank: the fields of the `rank` record: where the rank is in the layout, and the offset of its clock.
        max_bytes: the size at which the file is rotated.
    """

    def __init__(self, path: Path, attempt: int, rank: Event, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._attempt, self._max_bytes = path, attempt, max_bytes
        self._head = {"kind": "rank", "attempt": attempt, **rank}
        self._file: int | None = None
        self._size = 0
        self._saves: dict[int, float] = {}
        with suppress(OSError):
            self._open()

    def _open(self) -> int:
        if self._file is None:
            with suppress(FileExistsError):
                self._path.parent.mkdir()
            file = open_descriptor(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            truncate_torn_line(file)
            self._size = os.fstat(file).st_size
            self._file = file
            self._append(self._head)
        return self._file

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one record in a single system call; a record that cannot be written is lost."""
        with suppress(OSError):
            self._open()
            if self._size >= self._max_bytes:
                self.close()
                os.replace(self._path, older_file(self._path))
                self._open()
            self._append({"kind": kind, "attempt": self._attempt, **fields})

    def _append(self, record: Event) -> None:
        assert self._file is not None
        content = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if (written := os.write(self._file, content)) < len(content):
            remove_last_bytes(self._file, written)  # nothing but complete lines
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """Records the time inside: an evaluation, the stall of a save, a restore, the warm-up backward."""
        begin = time.time()
        self._saves = {step: begin} if name == "save" else self._saves
        try:
            yield
        finally:
            self._record(name, step, begin, time.time() - begin)

    def checkpoint(self, step: int, seconds: float) -> None:
        """Records that the save which began after this step took so long, in the background, until its end."""
        if (begin := self._saves.pop(step, None)) is not None:
            self._record("checkpoint", step, begin, seconds)

    def _record(self, name: str, step: int, begin: float, seconds: float) -> None:
        self.write("span", name=name, step=step, begin=round(begin, 6), seconds=round(seconds, 6))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
