"""The HTTP server of the page and of the metrics answers bad requests, and disconnects slow and silent clients."""

from __future__ import annotations

import socket
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from meshwright.insight import bounded_connection
from tests.kit.raw_requests import connect, exchange, get, read_all, served

LARGE = "x" * (32 << 20)


def application() -> Starlette:
    async def small(_request) -> PlainTextResponse:
        return PlainTextResponse("small")

    async def large(_request) -> PlainTextResponse:
        return PlainTextResponse(LARGE)

    return Starlette(routes=[Route("/", small), Route("/large", large)])


@pytest.fixture(scope="module")
def port():
    with served(application()) as port:
        yield port


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * (1 << 17) + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"400"),
        (get(method="DELETE", headers="Content-Length: 1000000000000\r\n"), b"405"),
        (get("/../../etc/passwd"), b"404"),
        (get("/%00%ff"), b"404"),
        (get(headers="Upgrade: websocket\r\nConnection: upgrade\r\n"), b"200"),
    ],
    ids=["TLS", "huge header", "two hosts", "huge body", "path", "null byte", "WebSocket"],
)
def test_unusual_request_is_answered(port, request_bytes, status):
    assert exchange(port, request_bytes).split()[1] == status


def test_client_that_sends_no_request_is_disconnected(monkeypatch):
    monkeypatch.setattr(bounded_connection, "CLIENT_SECONDS", 0.5)
    with served(application()) as port:
        assert exchange(port, b"GET / HTTP/1.1\r\nHost: local") == b""
        with connect(port) as client:  # a whole request, then nothing
            client.sendall(get().replace(b"Connection: close\r\n", b""))
            assert read_all(client).endswith(b"small")
        assert exchange(port, get()).endswith(b"small")


def test_client_that_does_not_read_the_answer_is_disconnected(monkeypatch):
    monkeypatch.setattr(bounded_connection, "CLIENT_SECONDS", 0.5)
    with served(application()) as port:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect(("127.0.0.1", port))
        slow.sendall(get("/large"))
        assert exchange(port, get()).endswith(b"small")
        time.sleep(1.5)  # longer than the deadline: what arrives afterwards is what was under way
        assert len(read_all(slow)) < len(LARGE)
        slow.close()


def test_number_of_connections_is_limited(monkeypatch):
    monkeypatch.setattr(bounded_connection, "MAX_CONNECTIONS", 5)
    with served(application()) as port:
        silent = [connect(port) for _ in range(5)]
        try:
            with connect(port) as client:
                assert read_all(client) == b""
        finally:
            for client in silent:
                client.close()
