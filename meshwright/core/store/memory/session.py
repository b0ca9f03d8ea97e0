"""Serves the files of a host's memory to a rank, over one authenticated connection. Torch-free.

The first frame of a connection is a hello, and each further frame a request: JSON, or `d` and content for the file that
is being written. Content is not answered; its errors are those of `close`. An answer is `+` and a result, or `-` and an
error. A file whose connection ends before it is closed is discarded.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from meshwright.core.channel import ChannelError, Connection
from meshwright.core.store.memory.keeper import PartFile, SnapshotKeeper

CONTENT, DONE, FAILED = b"d", b"+", b"-"
MAX_REQUEST_BYTES = (4 << 20) + 1
"""The size of a frame with content or with a request."""
KEEP_ALIVE_SECONDS = 30
"""A connection is tested after so many idle seconds: a host that lost its power says nothing."""
REQUESTS: dict[str, dict[str, type]] = {
    "create": {"name": str, "direct": bool},
    "reserve": {"bytes": int},
    "close": {"size": int},
    "read": {"name": str, "start": int, "length": int},
    "files": {},
    "remove": {"name": str},
    "retain": {"folders": list},
}
"""The fields of each kind of request."""


def encode_hello(attempt: int) -> bytes:
    """The first frame of a rank of an attempt."""
    return json.dumps({"kind": "store", "attempt": attempt}).encode()


def decode_hello(raw: bytes) -> int | None:
    """The attempt of a rank that says hello; None if the frame is another message."""
    try:
        hello = json.loads(raw)
        if hello["kind"] == "store" and len(hello) == 2 and type(hello["attempt"]) is int and hello["attempt"] > 0:
            return int(hello["attempt"])
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def decode_request(raw: bytes) -> dict[str, Any]:
    """The request of a frame. Raises ChannelError unless it is one of REQUESTS, with exactly its fields."""
    try:
        request = json.loads(raw)
        fields = REQUESTS[request["kind"]]
        valid = request.keys() == {"kind", *fields} and all(
            type(request[name]) is kind for name, kind in fields.items()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise ChannelError("a request is not valid")
    return dict(request)


class KeeperSession:
    """One connection of a rank, which writes at most one file at a time."""

    def __init__(self, keeper: SnapshotKeeper, connection: Connection, attempt: int) -> None:
        self.keeper, self.connection, self.attempt = keeper, connection, attempt
        self.part: PartFile | None = None
        self.failure: OSError | None = None
        """Why the content of the file could not be written."""

    def serve(self) -> None:
        """Answers requests until the connection ends."""
        stream = self.connection.stream
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS)
        self.keeper.fence(self.attempt)  # a rank of a newer attempt: this host has heard of it now
        try:
            while True:
                frame = self.connection.receive(MAX_REQUEST_BYTES)
                if frame[:1] == CONTENT:
                    self._append(memoryview(frame)[1:])
                else:
                    self.connection.send(self._answer(decode_request(frame)))
        finally:
            self._discard()

    def _append(self, content: memoryview) -> None:
        if self.part is None:
            raise ChannelError("content without a file")
        if self.failure is None:
            try:
                self.keeper.append(self.part, content)
            except OSError as error:
                self.failure = error
                self.keeper.discard(self.part)

    def _answer(self, request: dict[str, Any]) -> bytes:
        try:
            return DONE + self._perform(request)
        except OSError as error:
            message = error.strerror or str(error)
            return FAILED + json.dumps({"errno": error.errno or 0, "message": message}).encode()

    def _perform(self, request: dict[str, Any]) -> bytes:
        keeper = self.keeper
        match request["kind"]:
            case "create":
                self._discard()
                self.part = keeper.create(request["name"], self.attempt)
                return os.fsencode(self.part.path) if request["direct"] else b""
            case "reserve":
                keeper.reserve(self._open_part(), request["bytes"])
            case "close":
                part = self._open_part()
                if self.failure is not None:
                    raise self.failure
                keeper.complete(part, request["size"])
                self.part = None
            case "read":
                return keeper.read(request["name"], request["start"], request["length"])
            case "files":
                return json.dumps({"folder": str(keeper.folder), "files": keeper.files()}).encode()
            case "remove":
                keeper.remove(request["name"], self.attempt)
            case "retain":
                keeper.retain(request["folders"], self.attempt)
        return b""

    def _open_part(self) -> PartFile:
        if self.part is None:
            raise ChannelError("no file is being written")
        return self.part

    def _discard(self) -> None:
        if self.part is not None:
            self.keeper.discard(self.part)
        self.part = self.failure = None
