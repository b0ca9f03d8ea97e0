"""The files that a host keeps in its memory for the ranks of a job: bounded, write-once, fenced by attempt. Torch-free.

The folder is in a file system in memory. A file gets its name when it is complete. A host that has heard of an attempt
accepts no file of an earlier one: ranks that still run after others have replaced them publish nothing that counts.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from contextlib import suppress
from pathlib import Path

from meshwright.base.io import open_descriptor
from meshwright.base.store.interface import Buffer

NAME_PATTERN = re.compile(r"(checkpoints/step-[0-9]{8,18}\.a([0-9]{4,9}))/[a-z0-9][a-z0-9.-]{0,99}")
"""The names of the files of a snapshot: the folder of a checkpoint, which has the attempt, and a plain name."""
PARTS_FOLDER = "parts"
"""Where files are until they are complete."""
MEMORY_FRACTION = 0.5
"""The share of the file system that a host uses at most."""
MAX_FILES = 20_000
MAX_READ_BYTES = 4 << 20


class FencedAttempt(OSError):
    """A later attempt has taken over the run."""

    def __init__(self, attempt: int, newest: int) -> None:
        super().__init__(errno.ESTALE, f"attempt {attempt} is over: this host accepts files of attempt {newest}")


class PartFile:
    """A file that is being written."""

    def __init__(self, name: str, attempt: int, path: Path) -> None:
        self.name, self.attempt, self.path, self.size = name, attempt, path, 0
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def close(self) -> None:
        """Closes the descriptor once: its number may belong to another file afterwards."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class SnapshotKeeper:
    """Keeps the snapshots of ranks of this host and of another one. Connections call it from their threads."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """`limit` is the largest number of bytes of all files; by default a fraction of the file system."""
        self.folder, self.limit = folder, limit if limit is not None else memory_limit(folder)
        self.lock = threading.Lock()
        self.newest_attempt = 0
        self.sizes: dict[str, int] = {}
        """The size of every complete file."""
        self.parts: set[PartFile] = set()
        self.used = 0
        """The bytes of all files, complete or not."""
        (folder / PARTS_FOLDER).mkdir()

    def fence(self, attempt: int) -> None:
        """Accepts no files of attempts before this one from now on, and discards those that are incomplete."""
        with self.lock:
            if attempt > self.newest_attempt:
                self.newest_attempt = attempt
                for part in [part for part in self.parts if part.attempt < attempt]:
                    os.truncate(part.path, 0)  # its connection may be dead without having ended
                    self._forget(part)

    def create(self, name: str, attempt: int) -> PartFile:
        """Begins a new file. Raises FileExistsError if the name exists."""
        of_attempt = parse_name(name)[1]
        if of_attempt != attempt:
            raise OSError(errno.EACCES, f"a rank of attempt {attempt} writes no file of attempt {of_attempt}")
        with self.lock:
            self._require_current(attempt)
            if name in self.sizes:
                raise FileExistsError(errno.EEXIST, "the file exists and is not overwritten", name)
            if len(self.sizes) + len(self.parts) >= MAX_FILES:
                raise OSError(errno.ENOSPC, f"this host keeps {MAX_FILES:,} files already")
            part = PartFile(name, attempt, self.folder / PARTS_FOLDER / secrets.token_hex(8))
            self.parts.add(part)
            return part

    def reserve(self, part: PartFile, size: int) -> None:
        """Counts bytes that are about to be written. Raises OSError if there is no room for them."""
        with self.lock:
            self._require_current(part.attempt)
            if part not in self.parts:
                raise OSError(errno.EBADF, "the file was discarded")
            if size < 0 or self.used + size > self.limit:
                raise OSError(
                    errno.ENOSPC, f"the memory for snapshots is full ({self.used:,} of {self.limit:,} bytes are used)"
                )
            self.used += size
            part.size += size

    def append(self, part: PartFile, content: Buffer) -> None:
        view = memoryview(content)
        self.reserve(part, len(view))
        while view:
            view = view[os.write(part.file, view) :]

    def complete(self, part: PartFile, size: int) -> None:
        """Gives a file of this size its name, if its attempt is still the newest one."""
        with self.lock:
            self._require_current(part.attempt)
            if part not in self.parts:
                raise OSError(errno.EBADF, "the file was discarded")
            if (found := os.fstat(part.file).st_size) != size or size > part.size:
                raise OSError(errno.EIO, f"the file has {found:,} bytes; {size:,} were expected")
            target = self.folder / part.name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(part.path, target)  # raises FileExistsError if another connection was faster
            self.sizes[part.name] = size
            self.used += size  # `_forget` subtracts what was reserved
            self._forget(part)
        part.close()

    def discard(self, part: PartFile) -> None:
        """Ends a file that is not complete."""
        with self.lock:
            self._forget(part)
        part.close()

    def read(self, name: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from offset `start`; fewer at the end of the file."""
        parse_name(name)
        if start < 0 or not 0 <= length <= MAX_READ_BYTES:
            raise OSError(errno.EINVAL, f"expected a range of at most {MAX_READ_BYTES:,} bytes")
        if name not in self.sizes:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return read_range(self.folder / name, start, length)

    def files(self) -> dict[str, int]:
        """The size of every complete file, by name."""
        with self.lock:
            return dict(self.sizes)

    def retain(self, folders: list[str], attempt: int) -> None:
        """Removes every snapshot that is not listed."""
        self._remove([name for name in self.files() if parse_name(name)[0] not in folders], attempt)

    def remove(self, name: str, attempt: int) -> None:
        if name not in self.sizes:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        self._remove([name], attempt)

    def _remove(self, names: list[str], attempt: int) -> None:
        with self.lock:
            self._require_current(attempt)
            for name in names:
                if (size := self.sizes.pop(name, None)) is not None:
                    self.used -= size
                    with suppress(OSError):
                        os.unlink(self.folder / name)
                    with suppress(OSError):  # until it is empty
                        os.rmdir((self.folder / name).parent)

    def _require_current(self, attempt: int) -> None:
        if attempt < self.newest_attempt:
            raise FencedAttempt(attempt, self.newest_attempt)

    def _forget(self, part: PartFile) -> None:
        if part in self.parts:
            self.parts.remove(part)
            self.used -= part.size
            with suppress(OSError):
                os.unlink(part.path)


def parse_name(name: str) -> tuple[str, int]:
    """The folder and the attempt of a file. Raises OSError for a name that no snapshot has."""
    if not (match := NAME_PATTERN.fullmatch(name)):
        raise OSError(errno.EINVAL, "expected the name of a file of a snapshot")
    return match[1], int(match[2])


def read_range(path: Path, start: int, length: int) -> bytes:
    """Up to `length` bytes of a file from offset `start`."""
    file = open_descriptor(path, os.O_RDONLY)
    try:
        return os.pread(file, length, start)
    finally:
        os.close(file)


def memory_limit(folder: Path) -> int:
    """How many bytes a host keeps at most."""
    system = os.statvfs(folder)
    return int(MEMORY_FRACTION * system.f_frsize * system.f_blocks)
