"""Runs an ASGI application in a thread on a free port of the loopback interface, and sends it raw requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.observe.http_server import bind, make_server

TIMEOUT = 30.0


@contextmanager
def served(app) -> Iterator[tuple[str, int]]:
    listening = bind("127.0.0.1", 0, "test")
    server = make_server(app, "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    address = listening.getsockname()
    try:
        deadline = time.monotonic() + TIMEOUT
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield address
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, TIMEOUT)


def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    with connect(address) as client:
        client.sendall(request)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    answer = b""
    try:
        while block := client.recv(1 << 16):
            answer += block
    except ConnectionResetError:
        pass
    return answer


def get(path: str = "/", host: str = "127.0.0.1", method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n".encode()
