"""The files of token shards as verified memory maps: from a folder, or through a local cache of a store. Torch-free."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.io import open_regular_file
from meshwright.base.store.interface import Store
from meshwright.core.data.token_files import FileStatus
from meshwright.errors import DataError

BLOCK = 1 << 24
"""Bytes that are hashed or copied at once."""
LOCKS = 64
"""Lock files of a cache: two processes fetch at once if their files have different locks."""


class ShardFiles(Protocol):
    """Where the files of shards are."""

    def map(self, name: str, dtype: np.dtype[Any], count: int, digest: str) -> NDArray[Any]:
        """A file as a read-only memory map, verified by its digest; raises DataError."""
        ...

    def raise_if_changed(self) -> None: ...


def cache_folder() -> Path:
    """The folder of all caches: $MESHWRIGHT_CACHE or ~/.cache/meshwright."""
    return Path(os.environ.get("MESHWRIGHT_CACHE") or Path.home() / ".cache" / "meshwright")


class FolderFiles:
    """Shard files that are mapped from their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: dict[str, tuple[FileStatus, str]] = {}
        """name -> (status of the file when its digest was verified, digest)"""

    def map(self, name: str, dtype: np.dtype[Any], count: int, digest: str) -> NDArray[Any]:
        file = self.folder / name
        try:
            with open_regular_file(file, follow=True) as opened:
                status = FileStatus.read(file)
                array = map_exactly(opened, file, dtype, count)
        except OSError as error:
            raise damaged(file, f"cannot be read: {error.strerror}") from None
        if status is None or self.verified.get(name) != (status, digest):
            if digest_of(array) != digest:
                raise damaged(file, "does not match its digest")
            if status is not None:
                self.verified[name] = status, digest
        return array

    def raise_if_changed(self) -> None:
        for name, (status, digest) in list(self.verified.items()):
            file = self.folder / name
            now = FileStatus.read(file)
            if now is None or now == status:  # a deleted file keeps its content for this run
                continue
            try:
                with open_regular_file(file, follow=True) as opened:
                    same = now.size == status.size and digest_of(np.memmap(opened, np.uint8, "r")) == digest
            except OSError:
                same = False
            if not same:
                raise DataError(
                    f"data file {file} changed during the run",
                    "try to restore its content and to repeat the command: no checkpoint contains the changed data",
                )
            self.verified[name] = now, digest


class ShardCache:
    """Shard files that are fetched whole from a store into a local folder, where any number of processes share them.

    A file of the cache is named by its digest. A process holds a shared lock on each file that it maps: eviction
    removes the files that were used least recently until the cache has its size again, but never one that is locked.
    """

    def __init__(self, store: Store, name: Path, max_bytes: int, folder: Path | None = None) -> None:
        self.store, self.name, self.max_bytes = store, name, max_bytes
        self.folder = folder or cache_folder() / "shards"
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        self.verified: dict[str, tuple[int, ...]] = {}
        """digest -> device, inode, size and modification time of the file when it was verified"""

    def map(self, name: str, dtype: np.dtype[Any], count: int, digest: str) -> NDArray[Any]:
        file = self.folder / f"{digest}.shard"
        with self.writing():
            if (array := self.open_verified(file, dtype, count, digest)) is not None:
                return array
            with self.locked(f"{int(digest, 16) % LOCKS}.lock"):
                for _ in range(2):
                    if (array := self.open_verified(file, dtype, count, digest)) is not None:
                        return array
                    self.fetch(name, count * dtype.itemsize, digest, file)
        raise damaged(file, "is removed while it is in use")

    def open_verified(self, file: Path, dtype: np.dtype[Any], count: int, digest: str) -> NDArray[Any] | None:
        """The mapped file with a shared lock, or None if it has to be fetched.

        A memory map has its own descriptor of the file, so the lock lasts as long as the map.
        """
        try:
            with open_regular_file(file) as opened:
                fcntl.flock(opened, fcntl.LOCK_SH)
                status = FileStatus.read(file)
                if status is None or status.inode != os.fstat(opened.fileno()).st_ino:
                    return None  # evicted between open and lock
                array = map_exactly(opened, file, dtype, count)
        except (OSError, DataError):
            return None
        if self.verified.get(digest) != status[:4]:  # the access time changes the last field
            if digest_of(array) != digest:
                return None
            self.verified[digest] = status[:4]
        os.utime(file, ns=(time.time_ns(), status.modified))
        return array

    def fetch(self, name: str, size: int, digest: str, file: Path) -> None:
        """Copies a file of the store into the cache, and verifies it before it has its name there."""
        where = self.name / name
        found = self.store.size(name)
        if found is None:
            raise damaged(where, "does not exist")
        if found != size:  # nothing is evicted for a size that an untrusted index claims
            raise damaged(where, f"has {found:,} bytes instead of {size:,}")
        self.evict(size)
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part") as temporary:
            fcntl.flock(temporary, fcntl.LOCK_EX)
            state = xxhash.xxh3_128()
            for block in self.blocks(name, size):
                state.update(block)
                temporary.write(block)
            if state.hexdigest() != digest:
                raise damaged(where, "does not match its digest")
            temporary.flush()
            os.replace(temporary.name, file)
            Path(temporary.name).touch()  # NamedTemporaryFile deletes its name

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of a file of the store; raises DataError."""
        try:
            for start in range(0, size, BLOCK):
                yield self.store.read(name, start, min(BLOCK, size - start))
        except OSError as error:
            raise damaged(self.name / name, f"cannot be read: {error.strerror or error}") from None

    def evict(self, incoming: int) -> None:
        """Removes files that no process uses, the least recently used first, until `incoming` bytes have room."""
        with self.locked("evict.lock"):
            entries = []
            for file in self.folder.iterdir():
                if file.suffix == ".part":
                    remove_unlocked(file)  # the rest of a process that was killed
                elif file.suffix == ".shard":
                    with suppress(FileNotFoundError):
                        entries.append((file.stat().st_atime_ns, file.stat().st_size, file))
            total = sum(size for _, size, _ in entries) + incoming
            for _, size, file in sorted(entries):
                if total <= self.max_bytes:
                    return
                if remove_unlocked(file):
                    total -= size

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Reports a cache that cannot be written, for example because the disk is full."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the cache {self.folder} of {self.name} cannot be written: {error.strerror or error}",
                "try MESHWRIGHT_CACHE = a writable folder with free space, or data.shard_cache = 0",
            ) from None

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        with open(self.folder / name, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def raise_if_changed(self) -> None:
        """The cache has its own copy, so a change of the store cannot reach a run."""


def remove_unlocked(file: Path) -> bool:
    """Removes a file unless a process has locked it."""
    with suppress(OSError), open_regular_file(file) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
        return True
    return False


def map_exactly(opened: BinaryIO, file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size = os.fstat(opened.fileno()).st_size
    if size != count * dtype.itemsize:
        raise damaged(file, f"has {size:,} bytes instead of {count * dtype.itemsize:,}")
    return np.memmap(opened, dtype, "r", shape=(count,))


def damaged(file: Path, reason: str) -> DataError:
    return DataError(f"token shard {file} {reason}", "try to restore it, or meshwright data prepare again")


def digest_of(array: NDArray[Any]) -> str:
    """The xxh3_128 of the bytes of an array, block by block."""
    state, content = xxhash.xxh3_128(), array.view(np.uint8)
    for start in range(0, len(content), BLOCK):
        state.update(np.ascontiguousarray(content[start : start + BLOCK]).data)
    return state.hexdigest()
