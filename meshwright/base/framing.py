"""Messages between processes of one machine: a header in JSON and bytes, over a stream socket. Torch-free."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Buffer = bytes | bytearray | memoryview
Message = tuple[dict[str, Any], bytearray]

LENGTHS = struct.Struct(">IQ")
"""Before each message: the bytes of its JSON, and of the content that follows it."""
MAX_HEADER_BYTES = 64 << 20
MAX_CONTENT_BYTES = 1 << 32
RECEIVE_BYTES = 1 << 20


MAX_SOCKET_PATH = 107
"""The most bytes of the path of a Unix socket."""


@contextmanager
def socket_path(path: Path) -> Iterator[str]:
    """A path by which a Unix socket can be bound or reached, also if the path itself is too long for one."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class PeerEnded(OSError):
    """The other process has closed its end of the socket, or sends what is not a message."""


def send(connection: socket.socket, header: dict[str, Any], content: Buffer = b"") -> None:
    text, view = json.dumps(header).encode(), memoryview(content).cast("B")
    connection.sendall(LENGTHS.pack(len(text), len(view)) + text)
    if view:
        connection.sendall(view)


def receive(connection: socket.socket) -> Message:
    """Waits for a message. Raises PeerEnded if the other process has ended."""
    text_bytes, content_bytes = check_lengths(receive_exactly(connection, LENGTHS.size))
    header = parse_header(receive_exactly(connection, text_bytes))
    return header, receive_exactly(connection, content_bytes)


def receive_exactly(connection: socket.socket, count: int) -> bytearray:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise PeerEnded("the other process has ended")
        view = view[received:]
    return content


def check_lengths(packed: Buffer, max_content: int = MAX_CONTENT_BYTES) -> tuple[int, int]:
    text_bytes, content_bytes = LENGTHS.unpack(packed)
    if text_bytes > MAX_HEADER_BYTES or content_bytes > max_content:
        raise PeerEnded("a message is too long")
    return text_bytes, content_bytes


def parse_header(text: Buffer) -> dict[str, Any]:
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError):
        raise PeerEnded("a message is not JSON") from None
    if not isinstance(header, dict):
        raise PeerEnded("a message is not a record")
    return header


class MessageAssembler:
    """Assembles messages from the bytes of a socket that is read as they arrive, for a server with many clients."""

    def __init__(self, max_content: int = MAX_CONTENT_BYTES) -> None:
        """A message with more than `max_content` bytes of content is refused before they are read."""
        self.buffer, self.max_content = bytearray(), max_content

    def receive_available(self, connection: socket.socket) -> Iterator[Message]:
        """Reads once from a socket that is ready, and yields the messages that are complete."""
        block = connection.recv(RECEIVE_BYTES)
        if not block:
            raise PeerEnded("the other process has ended")
        self.buffer += block
        while len(self.buffer) >= LENGTHS.size:
            text_bytes, content_bytes = check_lengths(self.buffer[: LENGTHS.size], self.max_content)
            start, end = LENGTHS.size + text_bytes, LENGTHS.size + text_bytes + content_bytes
            if len(self.buffer) < end:
                return
            message = parse_header(self.buffer[LENGTHS.size : start]), self.buffer[start:end]
            del self.buffer[:end]
            yield message
