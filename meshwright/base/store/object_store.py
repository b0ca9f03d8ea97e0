"""A store in a bucket of S3, Google Cloud Storage or Azure, by URL. Torch-free.

An object appears whole or not at all, and `publish_if_absent` is one conditional request (If-None-Match). Nothing is
renamed, and no decision about a publication reads a listing. Every object carries a random token of its writer, so
that a request whose answer was lost can be told from one of another writer.
"""

from __future__ import annotations

import errno
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import numpy as np

from meshwright.base.store.interface import Buffer, OutcomeUnknown, Sink
from meshwright.base.store.object_calls import (
    MAX_OBJECT_BYTES,
    PART_BYTES,
    PARTS_IN_FLIGHT,
    ObjectCalls,
    RequestFailed,
    RequestLimits,
)
from meshwright.base.store.object_process import open_calls
from meshwright.base.store.object_url import parse_url
from meshwright.errors import ConfigError

READ_AHEAD_BYTES = 8 << 20
"""A larger request has the same latency: blocks of a file that a thread reads in order are fetched together. Longer
reads are made of requests of this size, so that one that fails repeats no more.
"""
READ_AHEAD_FROM = 1 << 18
"""Shorter reads are fetched alone."""
T = TypeVar("T")


class ReadAhead(threading.local):
    """What a thread has fetched and not yet read: the bytes from `position` of the file `name`."""

    name, position, content = "", 0, b""


class ObjectStore:
    """A `Store` in an object store. Its credentials come from the environment."""

    def __init__(self, url: str, limits: RequestLimits | None = None) -> None:
        self.url, self.limits = parse_url(url), limits or RequestLimits()
        self.known: set[str] = set()
        """Objects that exist, as an answer to this process has shown: a listing may be older than that answer."""
        self.ahead = ReadAhead()
        self.request_ends: dict[object, float] = {}
        """The time at which the requests under way will have ended, whatever the link does."""

    @property
    def calls(self) -> ObjectCalls:
        return open_calls(self.url, self.limits)

    def create(self, name: str) -> Sink:
        if self.size(name) is not None:
            raise self.exists(name)
        return ObjectSink(self, name)

    def publish_if_absent(self, name: str, content: bytes, before_publish: Callable[[], object] = lambda: None) -> bool:
        """See `Store.publish_if_absent`. One conditional request; if its answer is lost, the token tells whose object
        is there.
        """
        before_publish()
        published = self.put_if_absent("publish", name, content, secrets.token_hex(16))
        self.known.add(name)
        return published

    def put_if_absent(self, operation: str, name: str, content: Buffer, token: str) -> bool:
        """Whether the object is the one of this call. If a try may have succeeded without an answer, it is read back.

        Raises:
            OutcomeUnknown: it may be there, and cannot be read back.
            OSError: it is not there.
        """
        unanswered = False

        def put() -> None:
            nonlocal unanswered
            try:
                self.calls.put(name, content, token, True)
            except RequestFailed as error:
                unanswered = unanswered or error.retry
                raise

        failure: OSError | None = None
        try:
            self.repeat(operation, name, put, len(content))
            return True
        except FileExistsError:
            pass
        except OSError as error:
            if not unanswered:
                raise
            failure = error
        try:
            found = self.repeat("read", name, lambda: self.calls.get(name, len(content) + 1), len(content))
        except FileNotFoundError:
            if failure is not None:
                raise failure from None
            return False  # it was there, and has been deleted since
        except OSError as error:
            before = failure.strerror if failure is not None else f"cannot {operation} {self.path(name)}: it exists"
            reason = f"{before}, and whether it is there is unknown: {error.strerror}"
            raise OutcomeUnknown(errno.EIO, reason, self.path(name)) from None
        return found == (bytes(content), token)

    def replace(self, name: str, content: bytes) -> None:
        token = secrets.token_hex(16)
        self.repeat("replace", name, lambda: self.calls.put(name, content, token, False), len(content))

    def read(self, name: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        ahead = self.ahead
        if ahead.name == name and ahead.position == start and ahead.content:
            content, ahead.content = ahead.content[:length], ahead.content[length:]
            ahead.position += len(content)
            return (
                content if len(content) == length else content + self.read(name, ahead.position, length - len(content))
            )
        fetched = READ_AHEAD_BYTES if READ_AHEAD_FROM <= length < READ_AHEAD_BYTES else length
        content = self.read_range(name, start, fetched)
        ahead.name, ahead.position, ahead.content = name, start + length, content[length:]
        return content[:length]

    def read_range(self, name: str, start: int, length: int) -> bytes:
        blocks: list[bytes] = []
        for offset in range(0, length, READ_AHEAD_BYTES):
            blocks.append(self.read_block(name, start + offset, min(length - offset, READ_AHEAD_BYTES)))
            if len(blocks[-1]) < READ_AHEAD_BYTES:
                break
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def read_block(self, name: str, start: int, length: int) -> bytes:
        try:
            return self.repeat("read", name, lambda: self.calls.read(name, start, length), length)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EACCES):
                raise
            size = self.size(name)  # a range that begins at the end of the object is an error of the request
            if size is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", self.path(name)) from None
            if start >= size:
                return b""
            raise

    def size(self, name: str) -> int | None:
        try:
            return self.repeat("find", name, lambda: self.calls.head(name))[0]
        except FileNotFoundError:
            return None

    def list_names(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        known = {name[len(prefix) :].partition("/")[0] for name in self.known if name.startswith(prefix)}
        return sorted(known.union(self.repeat("list", folder, lambda: self.calls.list_folder(folder))))

    def list_sizes(self, folder: str) -> dict[str, int]:
        """The size of every object in a folder and below it, by its name in this store."""
        return self.repeat("list", folder, lambda: self.calls.list_sizes(folder))

    def remove(self, name: str) -> None:
        self.repeat("delete", name, lambda: self.calls.delete([name]))
        self.known.discard(name)

    def remove_folder(self, name: str) -> None:
        names = sorted(self.list_sizes(name))
        for start in range(0, len(names), 500):
            part = names[start : start + 500]
            self.repeat("delete", name, lambda part=part: self.calls.delete(part))  # type: ignore[misc]
        self.known = {known for known in self.known if not known.startswith(f"{name}/")}

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def exists(self, name: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, "there is an object of this name", self.path(name))

    @property
    def request_end(self) -> float:
        """Until when the requests that run may take (monotonic clock); 0 if none runs."""
        return max(list(self.request_ends.values()), default=0.0)

    def within_limits(self, request: object, size: int) -> None:
        """Called before a request with so many bytes; whoever makes it removes it from `request_ends` at its end."""
        self.request_ends[request] = time.monotonic() + self.limits.timeout + self.limits.body_seconds(size)

    def repeat(self, operation: str, name: str, request: Callable[[], T], size: int = 0) -> T:
        """Make a request, again after a random part of a growing time while it fails for a reason that may pass. `size`
        are the bytes of its body, or those of the answer.

        Raises:
            OSError: it failed for good. Its strerror names the operation, the object and the cause.
        """
        limits, tries = self.limits, 0
        end = time.monotonic() + limits.seconds + limits.body_seconds(size)
        running = object()
        while True:
            tries += 1
            self.within_limits(running, size)
            try:
                return request()
            except RequestFailed as error:
                pause = random.uniform(0, min(limits.max_backoff, limits.first_backoff * 2**tries))  # full jitter
                late = time.monotonic() + pause > end
                if error.retry and tries <= limits.retries and not late:
                    time.sleep(pause)
                    continue
                after = f" ({tries} tries)" if tries > 1 else ""
                code = errno.EACCES if error.denied else errno.EIO if error.retry else errno.EINVAL
                raise OSError(code, f"cannot {operation} {self.path(name)}: {error}{after}", self.path(name)) from None
            finally:
                self.request_ends.pop(running, None)


class UploadAborted(Exception):
    """The writer gave up an upload."""


class ObjectSink:
    """A new object. Up to one part it is a single conditional request. Beyond that, a thread uploads its parts while
    the next one is filled; memory is bounded by the parts in flight, and `abort` leaves nothing behind.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name, self.token = store, name, secrets.token_hex(16)
        self.part, self.filled, self.written = np.empty(PART_BYTES, np.uint8), 0, 0
        self.parts: queue.Queue[Buffer | None] = queue.Queue(1)
        self.thread: threading.Thread | None = None
        self.aborted = self.complete = self.closed = False
        self.failure: BaseException | None = None
        self.yielded = 0
        """The parts that have been handed to the library."""
        self.ended = threading.Event()

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        if self.written + len(view) > MAX_OBJECT_BYTES:
            reason = f"a shard has more than {MAX_OBJECT_BYTES:,} bytes; try more ranks"
            raise OSError(errno.EFBIG, f"cannot write {self.store.path(self.name)}: {reason}")
        self.written += len(view)
        while view:
            block = view[: PART_BYTES - self.filled]
            self.part[self.filled : self.filled + len(block)] = np.frombuffer(block, np.uint8)
            self.filled += len(block)
            view = view[len(block) :]
            if self.filled == PART_BYTES and view:  # the last part is kept for `close`
                self._submit()

    def close(self) -> None:
        if self.written <= PART_BYTES and self.thread is None:
            content = self.part[: self.filled].tobytes()
            try:
                if not self.store.put_if_absent("write", self.name, content, self.token):
                    raise self.store.exists(self.name)
            except OutcomeUnknown as error:  # an object that nothing refers to is not published
                raise OSError(error.errno, error.strerror, error.filename) from None
        else:
            self._submit()
            # obstore cannot complete an upload on a condition: the name is looked up directly before.
            if self.store.size(self.name) is not None:
                self.abort()
                raise self.store.exists(self.name)
            self._put(None)
            assert self.thread is not None
            self.thread.join()
            self._raise_failure()
        self.closed = True
        self.store.known.add(self.name)

    def abort(self) -> None:
        """Abort the upload. A call after `close` has no effect."""
        if self.thread is not None and not self.closed:
            self.aborted = True
            while self.thread.is_alive():
                try:
                    self.parts.put(None, timeout=0.05)
                except queue.Full:
                    continue
                self.thread.join(0.05)
        self.closed = True

    def _submit(self) -> None:
        """Hand the part that is filled to the thread, and begin another."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._upload, name="upload", daemon=True)
            self.thread.start()
        part, self.part = self.part[: self.filled], np.empty(PART_BYTES, np.uint8)
        self.filled = 0
        self._put(part.data)

    def _put(self, part: Buffer | None) -> None:
        while not self.ended.is_set():
            try:
                self.parts.put(part, timeout=0.1)
                return
            except queue.Full:
                continue
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _upload(self) -> None:
        """The work of the thread. Its error is raised in the thread that writes."""
        try:
            self.store.calls.upload(self.name, self._blocks(), self.token)
            if not self._is_there():
                raise RequestFailed("the object differs from what was written", retry=False)
        except UploadAborted:
            pass
        except (RequestFailed, OSError) as error:
            if not (self.complete and self._is_there()):
                path = self.store.path(self.name)
                cause = error if isinstance(error, RequestFailed) else error.strerror or type(error).__name__
                arrived = max(0, self.yielded - PARTS_IN_FLIGHT) * PART_BYTES
                self.failure = OSError(
                    errno.EIO, f"cannot write {path}: {cause}, after {arrived:,} of {self.written:,} bytes", path
                )
        except BaseException as error:  # noqa: BLE001  the thread that writes raises it
            self.failure = error
        finally:
            self.store.request_ends.pop(self, None)
            self.ended.set()

    def _blocks(self) -> Iterator[Buffer]:
        while (part := self.parts.get()) is not None:
            self.store.within_limits(self, PARTS_IN_FLIGHT * PART_BYTES)
            self.yielded += 1
            yield part
        if self.aborted:
            raise UploadAborted
        self.complete = True

    def _is_there(self) -> bool:
        """Whether the object is the one that this sink wrote, although the answer to its completion may be lost."""
        try:
            found = self.store.repeat("find", self.name, lambda: self.store.calls.head(self.name))
        except OSError:
            return False
        return found == (self.written, self.token)


def require_conditional_put(store: ObjectStore) -> None:
    """Raises a ConfigError unless the store is there, writable, and refuses to write an object twice. A store that
    ignores the condition would let two jobs publish the same checkpoint.
    """
    name = f".probe-{secrets.token_hex(8)}"
    hint = (
        "expected a bucket that this user can write to, and that supports If-None-Match on PUT; try another --run URL"
    )
    try:
        first = store.publish_if_absent(name, b"first")
        second = store.publish_if_absent(name, b"second")
        content = store.read(name, 0, 100)
    except OSError as error:
        raise ConfigError(f"{store.url} cannot be used: {error.strerror or type(error).__name__}", hint) from None
    finally:
        with suppress(OSError):  # the error above says why
            store.remove(name)
    if not first or second or content != b"first":
        raise ConfigError(
            f"{store.url}: the object store does not support conditional writes: it ignores If-None-Match, so that two "
            "jobs could publish the same checkpoint",
            hint,
        )
