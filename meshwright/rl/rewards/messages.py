"""Messages between a generator and the processes of its reward: JSON with a length before it, and a deadline.
Torch-free.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from typing import Any

LENGTH = struct.Struct("<I")
MAX_REQUEST_BYTES = 256 << 20
"""Size limit of a group of completions."""
MAX_REPLY_BYTES = 1 << 20
"""Size limit of the rewards of a group: 4,096 numbers, or the text of a failure."""
CHUNK = 1 << 20


class InvalidMessage(ValueError):
    """Bytes that are not a message."""


def encode_message(value: dict[str, Any], limit: int) -> bytes:
    """Raises InvalidMessage for a message above the limit."""
    content = json.dumps(value).encode()
    if len(content) > limit:
        raise InvalidMessage(f"a message of {len(content):,} bytes, expected at most {limit:,}")
    return LENGTH.pack(len(content)) + content


def send_message(channel: socket.socket, content: bytes, deadline: float = math.inf) -> None:
    """Sends an encoded message. Raises TimeoutError at the deadline, a time of `time.monotonic`."""
    rest = memoryview(content)
    while rest:
        wait_until(channel, deadline)
        rest = rest[channel.send(rest) :]


def receive_message(channel: socket.socket, limit: int, deadline: float = math.inf) -> dict[str, Any] | None:
    """The next message; None if the other process has closed the channel. Raises InvalidMessage for other bytes, and
    TimeoutError at the deadline.
    """
    content = receive_content(channel, limit, deadline)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidMessage("a message that is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidMessage("a message that is not a record")
    return value


def receive_content(channel: socket.socket, limit: int, deadline: float = math.inf) -> bytes | None:
    """The bytes of the next message, which are not parsed."""
    header = receive_bytes(channel, LENGTH.size, deadline)
    if header is None:
        return None
    (length,) = LENGTH.unpack(header)
    if length > limit:
        raise InvalidMessage(f"a message of {length:,} bytes, expected at most {limit:,}")
    return receive_bytes(channel, length, deadline)


def receive_bytes(channel: socket.socket, count: int, deadline: float) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        wait_until(channel, deadline)
        received = channel.recv(min(CHUNK, count - len(content)))
        if not received:
            return None
        content += received
    return bytes(content)


def wait_until(channel: socket.socket, deadline: float) -> None:
    """Makes the next call of the channel raise TimeoutError at the deadline."""
    if deadline == math.inf:
        channel.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    channel.settimeout(left)
