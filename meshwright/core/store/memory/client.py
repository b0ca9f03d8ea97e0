"""Reads and writes the files that another process of the job, a keeper, has in its host's memory. Torch-free."""

from __future__ import annotations

import json
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.io import open_descriptor
from meshwright.base.store.interface import Buffer
from meshwright.core.channel import ChannelError, Connection, connect
from meshwright.core.store.memory.keeper import MAX_READ_BYTES, read_range
from meshwright.core.store.memory.session import CONTENT, DONE, encode_hello

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
"""How long a rank waits for a host that does not answer."""
FRAME_BYTES = 1 << 20
GRANT_BYTES = 4 << 20
"""Bytes that a rank reserves at a time for a file that it writes itself."""
QUEUED_FRAMES = 16


@dataclass(frozen=True)
class KeeperAddress:
    """A host, and where its supervisor listens."""

    host: str
    address: str
    port: int


class KeeperClient:
    """The files of one host, seen from a rank of an attempt. Any thread may call it."""

    def __init__(self, keeper: KeeperAddress, secret: bytes, attempt: int, is_local: bool = False) -> None:
        """`is_local`: whether the rank runs on that host, and sees its files."""
        self.keeper, self.secret, self.attempt, self.is_local = keeper, secret, attempt, is_local
        self.lock = threading.Lock()
        self.session: ClientSession | None = None
        self.folder = Path()
        """Where the keeper's files are, if this rank runs on its host."""

    def open_session(self) -> ClientSession:
        keeper = self.keeper
        return ClientSession(
            keeper.host, connect((keeper.address, keeper.port), self.secret, CONNECT_SECONDS), self.attempt
        )

    def request(self, kind: str, **fields: Any) -> bytes:
        """The answer to a request; the connection of an earlier one is used again. Raises OSError."""
        with self.lock:
            session, self.session = self.session, None
            if session is not None:
                try:
                    answer = session.request(kind, **fields)
                    self.session = session
                    return answer
                except ChannelError:
                    pass  # the connection has ended since: the request, which may be repeated, opens another one
            session = self.open_session()
            answer = session.request(kind, **fields)
            self.session = session
            return answer

    def files(self) -> dict[str, int]:
        """The size of every file that the host has, by name."""
        try:
            answer = json.loads(self.request("files"))
            self.folder = Path(answer["folder"])
            return {str(name): int(size) for name, size in answer["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ChannelError(f"host {self.keeper.host} sent a list of files that is not valid") from None

    def read(self, name: str, start: int, length: int) -> bytes:
        if self.is_local:
            return read_range(self.folder / name, start, length)
        parts = []
        while length > 0:
            part = self.request("read", name=name, start=start, length=min(length, MAX_READ_BYTES))
            parts.append(part)
            start, length = start + len(part), length - len(part) if part else 0
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file. Raises FileExistsError if the name exists."""
        sink = self.create(name)
        try:
            sink.write(content)
            sink.close()
        finally:
            sink.abort()

    def create(self, name: str) -> LocalSink | RemoteSink:
        session = self.open_session()
        try:
            return LocalSink(session, name) if self.is_local else RemoteSink(session, name)
        except OSError:
            session.close()
            raise

    def close(self) -> None:
        with self.lock:
            if self.session is not None:
                self.session.close()
                self.session = None


class ClientSession:
    """One connection to a keeper."""

    def __init__(self, host: str, connection: Connection, attempt: int) -> None:
        self.host, self.connection = host, connection
        connection.stream.settimeout(ANSWER_SECONDS)
        connection.send(encode_hello(attempt))

    def request(self, kind: str, **fields: Any) -> bytes:
        """The result of a request. Raises OSError with what the host says."""
        try:
            self.connection.send(json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode())
            answer = self.connection.receive()
        except ChannelError as error:
            raise ChannelError(f"host {self.host} does not answer: {error}") from None
        if answer[:1] == DONE:
            return answer[1:]
        try:
            values = json.loads(answer[1:])
            number, message = int(values["errno"]), str(values["message"])[:1000]
        except (ValueError, KeyError, TypeError):
            raise ChannelError(f"host {self.host} sent an answer that is not valid") from None
        raise OSError(number, f"host {self.host}: {message}")

    def close(self) -> None:
        self.connection.close()


class LocalSink:
    """A file in the memory of this host. The rank writes it itself; the keeper gives it its name."""

    def __init__(self, session: ClientSession, name: str) -> None:
        self.session, self.granted, self.size = session, 0, 0
        """`granted`: bytes that were reserved and not written yet."""
        path = os.fsdecode(session.request("create", name=name, direct=True))
        self.file = open_descriptor(path, os.O_WRONLY)

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        while view:
            if not self.granted:
                self.session.request("reserve", bytes=GRANT_BYTES)
                self.granted = GRANT_BYTES
            written = os.write(self.file, view[: self.granted])
            self.granted, self.size = self.granted - written, self.size + written
            view = view[written:]

    def close(self) -> None:
        self._close_file()
        self.session.request("close", size=self.size)
        self.session.close()

    def abort(self) -> None:
        """The keeper discards the file when the connection ends, unless it is complete."""
        self._close_file()
        self.session.close()

    def _close_file(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class RemoteSink:
    """A file in the memory of another host. A thread sends the content, which must not change before `close`."""

    def __init__(self, session: ClientSession, name: str) -> None:
        self.session, self.size = session, 0
        self.failure: OSError | None = None
        session.request("create", name=name, direct=False)
        self.frames: queue.Queue[memoryview | None] = queue.Queue(QUEUED_FRAMES)
        self.thread = threading.Thread(target=self._send, name="snapshot", daemon=True)
        self.thread.start()

    def _send(self) -> None:
        while (frame := self.frames.get()) is not None:
            if self.failure is None:
                try:
                    self.session.connection.send(b"".join((CONTENT, frame)))
                except OSError as error:
                    self.failure = ChannelError(f"host {self.session.host} takes no snapshot: {error}")

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        self.size += len(view)
        for start in range(0, len(view), FRAME_BYTES):
            if self.failure is not None:
                raise self.failure
            self.frames.put(view[start : start + FRAME_BYTES])

    def close(self) -> None:
        """Return once the host has the file."""
        self._end()
        if self.failure is not None:
            raise self.failure
        self.session.request("close", size=self.size)
        self.session.close()

    def abort(self) -> None:
        with suppress(OSError):
            self.session.close()  # a thread that waits for the network ends
        self._end()

    def _end(self) -> None:
        if self.thread.is_alive():
            self.frames.put(None)
            self.thread.join()
