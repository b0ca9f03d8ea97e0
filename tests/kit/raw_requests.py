"""Sends raw bytes to an HTTP server on the loopback interface, as a well-behaved client would not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.insight.watch.http_server import HttpServer

TIMEOUT = 30.0


@contextmanager
def served(app) -> Iterator[int]:
    """The port of a server of an ASGI application."""
    server = HttpServer(app, port=0)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()
    assert not server.failure


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), TIMEOUT)


def exchange(port: int, request: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    with connect(port) as client:
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


def get(path: str = "/", method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}\r\n".encode()
