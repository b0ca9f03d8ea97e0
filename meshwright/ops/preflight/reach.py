"""Whether hosts accept TCP connections from each other, before a process group connects all ranks. Torch-free."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

CONNECT_TIMEOUT = 3.0
"""Seconds within which a host must answer."""
MAX_PARTNERS = 32
"""Hosts that one host connects to."""
MAX_TOKEN_BYTES = 64
"""Limit of what a host answers."""
SIOCGIFADDR = 0x8915
"""The request of Linux for the IPv4 address of an interface."""


def host_address() -> str:
    """The address at which other hosts reach this one: MESHWRIGHT_HOST_ADDRESS, or that of Gloo's interface.

    Without GLOO_SOCKET_IFNAME, Gloo uses the address of the host name, or the loopback address if it has none.
    """
    if given := os.environ.get("MESHWRIGHT_HOST_ADDRESS", "").strip():
        return given
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return "127.0.0.1"


@contextmanager
def answer_with(token: str, address: str) -> Iterator[int]:
    """Listens on a free port, which is yielded, and sends `token` to everyone who connects."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server(("", 0), family=family) as server:
        server.settimeout(0.2)
        ended = threading.Event()

        def accept() -> None:
            while not ended.is_set():
                with suppress(OSError):  # nobody connects, or the peer has gone
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(CONNECT_TIMEOUT)
                        connection.sendall(token.encode()[:MAX_TOKEN_BYTES])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            thread.join()


def partners(number: int, hosts: int) -> list[int]:
    """The hosts that a host connects to: all others, or evenly spaced ones."""
    others = hosts - 1
    count = min(others, MAX_PARTNERS)
    return [(number + 1 + index * others // count) % hosts for index in range(count)]


def connect_to_hosts(addresses: Mapping[str, tuple[str, int, str]]) -> dict[str, str]:
    """Host -> why it cannot be reached, or an empty string. An address is (address, port, expected answer)."""
    with ThreadPoolExecutor(max(1, len(addresses))) as threads:
        return dict(zip(addresses, threads.map(connect, addresses.values()), strict=True))


def connect(address: tuple[str, int, str]) -> str:
    """Why another host answers there, or none; an empty string if it is the right one."""
    host, port, token = address
    where = f"{host} port {port}"
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT) as connection:
            connection.settimeout(CONNECT_TIMEOUT)
            answer = b""
            while len(answer) < len(token) and (part := connection.recv(MAX_TOKEN_BYTES)):
                answer += part
    except OSError as error:
        return f"{where}: {error.strerror or 'no answer'}"
    return "" if answer == token.encode() else f"{where}: another process answers"
