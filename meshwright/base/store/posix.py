"""A store in a directory of a POSIX file system with hard links and a reliable fsync. Torch-free.

Every system call goes through `PosixCalls`, one method per call, so that a test can substitute a simulated disk and
crash at each call.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.base.io import open_descriptor
from meshwright.base.store.interface import Buffer, OutcomeUnknown, Sink
from meshwright.errors import CheckpointError

Block = NDArray[np.uint8]


class PosixCalls:
    """The system calls that a `PosixStore` makes."""

    def make_folder(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, file: int, content: Buffer, offset: int) -> int:
        return os.pwrite(file, content, offset)

    def set_direct(self, file: int, direct: bool) -> bool:
        """Write past the page cache from now on, or not; returns whether the file system does."""
        flags, direct_flag = fcntl.fcntl(file, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | direct_flag if direct else flags & ~direct_flag)
        except OSError:
            return False
        return direct

    def start_thread(self) -> Executor:
        """A thread that writes the blocks of a file."""
        return ThreadPoolExecutor(1, thread_name_prefix="store")

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def link(self, path: str, name: str) -> None:
        os.link(path, name)

    def rename(self, path: str, name: str) -> None:
        os.rename(path, name)

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

    def list_names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size(self, path: str) -> int:
        return os.lstat(path).st_size

    def read(self, path: str, start: int, length: int) -> bytes:
        file = open_descriptor(path, os.O_RDONLY)
        try:
            blocks = []
            while length > 0 and (block := os.pread(file, length, start)):  # one call may return less than requested
                blocks.append(block)
                start, length = start + len(block), length - len(block)
            return b"".join(blocks) if len(blocks) != 1 else blocks[0]
        finally:
            os.close(file)


class PosixStore:
    """A `Store` in a directory."""

    def __init__(self, root: Path, calls: PosixCalls | None = None) -> None:
        self.root, self.calls = str(root), calls or PosixCalls()
        self.durable_folders: set[str] = set()
        """Folders whose names this store has synced. That a folder exists does not imply that its name is durable."""

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def create(self, name: str) -> Sink:
        try:
            return self._create(name)
        except FileNotFoundError:  # another process has removed a folder that this store had created
            self.durable_folders.clear()
            return self._create(name)

    def _create(self, name: str) -> Sink:
        self._make_folders(os.path.dirname(name))
        return PosixSink(self.calls, self.path(name))

    def publish_if_absent(self, name: str, content: bytes, before_publish: Callable[[], object] = lambda: None) -> bool:
        """See `Store.publish_if_absent`. The content is made durable under a temporary name, then hard-linked."""
        folder, _, base = name.rpartition("/")
        temporary = f"{folder}/.{base}.{secrets.token_hex(6)}".lstrip("/")
        sink = self.create(temporary)
        try:
            sink.write(content)
            sink.close()
        except BaseException:
            sink.abort()
            raise
        before_publish()
        try:
            self.calls.link(self.path(temporary), self.path(name))  # unlike rename, link fails if the name exists
            self.calls.sync_folder(self.path(folder))
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise CheckpointError(
                    f"{self.root}: the file system does not support hard links",
                    "try --run DIR on a file system that supports them",
                ) from None
            try:
                absent = self.size(name) is None
            except OSError:
                absent = False
            if absent:
                raise
            raise OutcomeUnknown(error.errno, error.strerror, self.path(name)) from None  # it may not be durable
        finally:
            with suppress(OSError):  # a temporary file that remains is never listed
                self.calls.remove(self.path(temporary))

    def replace(self, name: str, content: bytes) -> None:
        """See `Store.replace`. Nothing is synced: after a power loss an earlier content may be back."""
        folder, _, base = name.rpartition("/")
        self._make_folders(folder)
        temporary = self.path(f"{folder}/.{base}.{secrets.token_hex(6)}".lstrip("/"))
        file = self.calls.create(temporary)
        try:
            try:
                offset = 0
                while offset < len(content):
                    offset += self.calls.write(file, content[offset:], offset)
            finally:
                self.calls.close(file)
            self.calls.rename(temporary, self.path(name))
        except OSError:
            with suppress(OSError):
                self.calls.remove(temporary)
            raise

    def read(self, name: str, start: int, length: int) -> bytes:
        return self.calls.read(self.path(name), start, length)

    def size(self, name: str) -> int | None:
        try:
            return self.calls.size(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list_names(self, folder: str) -> list[str]:
        try:
            return sorted(self.calls.list_names(self.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        """Delete durably, so that a crash never undoes this removal while it keeps a later one."""
        self.calls.remove(self.path(name))
        self.calls.sync_folder(self.path(os.path.dirname(name)))

    def remove_folder(self, name: str) -> None:
        for inner in self.list_names(name):
            self.calls.remove(self.path(f"{name}/{inner}"))
        self.calls.remove_folder(self.path(name))
        self.durable_folders.discard(name)

    def _make_folders(self, folder: str) -> None:
        """Create a folder and its parents, and sync each name in its parent, whichever process created it."""
        if not folder or folder in self.durable_folders:
            return
        parent = os.path.dirname(folder)
        self._make_folders(parent)
        with suppress(FileExistsError):
            self.calls.make_folder(self.path(folder))
        self.calls.sync_folder(self.path(parent))
        self.durable_folders.add(folder)


class PosixSink:
    """A new file. A thread writes its full blocks directly to the disk, past the page cache, while the next one is
    filled; the rest is written when it is closed. After a failed write the file is never retried or overwritten.
    """

    BLOCK_BYTES = 32 << 20

    def __init__(self, calls: PosixCalls, path: str) -> None:
        self.calls, self.path = calls, path
        self.file: int | None = calls.create(path)
        self.block, self.filled, self.offset = self._new_block(), 0, 0
        """The block that is being filled, its bytes so far, and its offset in the file."""
        self.thread: Executor | None = None
        self.writing: Future[Block] | None = None
        """The write of the block before."""
        self.direct = False

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        while view:
            part = view[: self.BLOCK_BYTES - self.filled]
            self.block[self.filled : self.filled + len(part)] = np.frombuffer(part, np.uint8)
            self.filled += len(part)
            if self.filled == self.BLOCK_BYTES:
                self._submit_block()
            view = view[len(part) :]

    def close(self) -> None:
        assert self.file is not None
        if self.writing is not None:
            self.writing.result()
        if self.direct:
            self._write_buffered()
        self._write_all(self.block[: self.filled], self.offset)
        self.calls.sync(self.file)
        file, self.file = self.file, None
        self.calls.close(file)
        self.calls.sync_folder(os.path.dirname(self.path))

    def abort(self) -> None:
        """Close the file handle. The bytes written so far stay, unpublished, until retention deletes them."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)
        if self.file is not None:
            file, self.file = self.file, None
            self.calls.close(file)

    def _new_block(self) -> Block:
        """Memory that begins at a page, as direct writes require."""
        return np.frombuffer(mmap.mmap(-1, self.BLOCK_BYTES), np.uint8)

    def _submit_block(self) -> None:
        assert self.file is not None
        if self.thread is None:
            self.thread = self.calls.start_thread()
            self.direct = self.calls.set_direct(self.file, True)
        before, self.writing = self.writing, self.thread.submit(self._write_all, self.block, self.offset)
        self.block = before.result() if before is not None else self._new_block()
        self.offset, self.filled = self.offset + self.BLOCK_BYTES, 0

    def _write_all(self, block: Block, offset: int) -> Block:
        assert self.file is not None
        view = block.data
        while view:
            direct = self.direct
            try:
                written = self.calls.write(self.file, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._write_buffered()  # the disk requires another alignment
                continue
            view, offset = view[written:], offset + written
        return block

    def _write_buffered(self) -> None:
        assert self.file is not None
        self.direct = self.calls.set_direct(self.file, False)
