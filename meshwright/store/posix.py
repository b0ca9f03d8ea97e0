"""Where checkpoints are kept: durable new files, and one way to publish. Torch-free.

A file is written once, under a new name, and is durable when it is closed. `publish_if_absent` makes a small file
appear whole or not at all, once. Everything goes through `Calls`, one method a system call, so that a test can put a
simulated disk there and crash at each of them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from meshwright.errors import CheckpointError

Buffer = bytes | bytearray | memoryview


class Calls:
    """The system calls that a store makes."""

    def make_folder(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, file: int, content: Buffer) -> int:
        return os.write(file, content)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def link(self, path: str, name: str) -> None:
        os.link(path, name)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def read(self, path: str, start: int, length: int) -> bytes:
        # Neither a pipe that never answers nor a link to somewhere else is a file of ours.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "no plain file", path)
            parts = []
            while length > 0 and (part := os.pread(file, length, start)):  # a call may give less than was asked for
                parts.append(part)
                start, length = start + len(part), length - len(part)
            return b"".join(parts) if len(parts) != 1 else parts[0]
        finally:
            os.close(file)


class Sink(Protocol):
    """A new file on its way."""

    def write(self, content: Buffer) -> None: ...

    def close(self) -> None:
        """Returns once the file and its name are durable."""
        ...

    def abandon(self) -> None: ...


class Store(Protocol):
    """What a checkpoint needs of storage. Names are relative, with `/` between folders."""

    def create(self, name: str) -> Sink: ...

    def publish_if_absent(self, name: str, content: bytes, before: Callable[[], object] = ...) -> bool: ...

    def read(self, name: str, start: int, length: int) -> bytes: ...

    def size(self, name: str) -> int | None: ...

    def names(self, folder: str) -> list[str]: ...

    def remove(self, name: str) -> None: ...

    def remove_folder(self, name: str) -> None: ...


class PosixStore:
    """A store in a folder of a file system that has hard links and honours fsync."""

    def __init__(self, root: Path, calls: Calls | None = None) -> None:
        self.root, self.calls = str(root), calls or Calls()
        self.durable: set[str] = set()
        """folders whose names this store has synced itself; that one exists says nothing of that"""

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def create(self, name: str) -> Sink:
        try:
            return self._create(name)
        except FileNotFoundError:  # somebody has removed a folder that was there
            self.durable.clear()
            return self._create(name)

    def _create(self, name: str) -> Sink:
        self._folders(os.path.dirname(name))
        return PosixSink(self.calls, self.path(name))

    def publish_if_absent(self, name: str, content: bytes, before: Callable[[], object] = lambda: None) -> bool:
        """Whether this call put it there. Durable when it returns True; `before` runs just before the name appears."""
        folder, _, base = name.rpartition("/")
        part = f"{folder}/.{base}.{secrets.token_hex(6)}".lstrip("/")
        sink = self.create(part)
        try:
            sink.write(content)
            sink.close()
        except BaseException:
            sink.abandon()
            raise
        before()
        try:
            self.calls.link(self.path(part), self.path(name))  # fails if the name exists, unlike rename
            self.calls.sync_folder(self.path(folder))
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise CheckpointError(
                    f"{self.root}: this file system has no hard links", "give a --run DIR on one that has"
                ) from None
            raise
        finally:
            with suppress(OSError):  # a part that stays is never listed
                self.calls.remove(self.path(part))

    def read(self, name: str, start: int, length: int) -> bytes:
        return self.calls.read(self.path(name), start, length)

    def size(self, name: str) -> int | None:
        try:
            return self.calls.size(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(self.calls.names(self.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        """Durably, so that what is removed next is never missed before this."""
        self.calls.remove(self.path(name))
        self.calls.sync_folder(self.path(os.path.dirname(name)))

    def remove_folder(self, name: str) -> None:
        for inner in self.names(name):
            self.calls.remove(self.path(f"{name}/{inner}"))
        self.calls.remove_folder(self.path(name))
        self.durable.discard(name)

    def _folders(self, folder: str) -> None:
        """Makes a folder and those above it, each one's name durable in the one above, whoever has made it."""
        if not folder or folder in self.durable:
            return
        above = os.path.dirname(folder)
        self._folders(above)
        with suppress(FileExistsError):
            self.calls.make_folder(self.path(folder))
        self.calls.sync_folder(self.path(above))
        self.durable.add(folder)


class PosixSink:
    """Small writes are gathered; an error, once seen, is never written over."""

    GATHER = 1 << 20

    def __init__(self, calls: Calls, path: str) -> None:
        self.calls, self.path = calls, path
        self.file: int | None = calls.create(path)
        self.gathered = bytearray()

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        if len(view) < self.GATHER:
            self.gathered += view
            if len(self.gathered) >= self.GATHER:
                self._flush()
            return
        self._flush()
        self._all(view)

    def close(self) -> None:
        assert self.file is not None
        self._flush()
        self.calls.sync(self.file)
        file, self.file = self.file, None
        self.calls.close(file)
        self.calls.sync_folder(os.path.dirname(self.path))

    def abandon(self) -> None:
        """Lets go of the file; what was written stays, unpublished, until it is collected."""
        if self.file is not None:
            file, self.file = self.file, None
            self.calls.close(file)

    def _flush(self) -> None:
        self._all(memoryview(self.gathered))
        self.gathered = bytearray()

    def _all(self, view: memoryview) -> None:
        assert self.file is not None
        while view:
            view = view[self.calls.write(self.file, view) :]
