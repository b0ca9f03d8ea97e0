"""Bytes that the sockets of this process have received, from the kernel's own counters of every connection.

The counters belong to single connections, so other processes on the machine do not change them, unlike those of a
network interface. They exist on Linux; some sandboxes leave them at 0.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

TCP_INFO = 11
"""The socket option of Linux; Python's `socket` has no name for it on all platforms."""
RECEIVED = struct.Struct("<Q")
AT_RECEIVED = 128
"""The offset of `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h, since Linux 4.2)."""


def received_bytes() -> int:
    """The bytes that all open TCP connections of this process have received so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # not a socket, or closed since
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                total += received_by(int(name))
    return total


def received_by(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
        return RECEIVED.unpack_from(info, AT_RECEIVED)[0] if len(info) >= AT_RECEIVED + RECEIVED.size else 0
