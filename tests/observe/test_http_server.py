"""The HTTP server of the page and the metrics answers good requests, and gets rid of bad, slow and silent clients."""

from __future__ import annotations

import socket
import time

import pytest
from served import connect, exchange, get, read_all, served
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from meshwright.errors import ConfigError
from meshwright.observe import http_server
from meshwright.observe.http_server import bind, host_name, is_loopback

LARGE = "x" * (32 << 20)


def application() -> Starlette:
    async def small(_request) -> PlainTextResponse:
        return PlainTextResponse("small")

    async def large(_request) -> PlainTextResponse:
        return PlainTextResponse(LARGE)

    return Starlette(routes=[Route("/", small), Route("/large", large)])


@pytest.fixture(scope="module")
def address():
    with served(application()) as address:
        yield address


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9400", "127.0.0.1", "127.0.0.1:9400", "[::1]:9400"])
def test_request_for_this_machine_is_answered(address, host):
    assert exchange(address, get(host=host)).endswith(b"small")


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:9400", "127.0.0.1.attacker.example", "", "[::"])
def test_host_header_of_another_name_is_refused(address, host):
    assert exchange(address, get(host=host)).startswith(b"HTTP/1.1 421 ")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * (1 << 17) + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"400"),
        (get(method="POST"), b"405"),
        (get(method="DELETE"), b"405"),
        (get("/../../etc/passwd"), b"404"),
        (get("/%00%ff"), b"404"),
    ],
    ids=["TLS", "huge header", "two hosts", "POST", "DELETE", "path", "null byte"],
)
def test_bad_request_is_answered_with_an_error(address, request_bytes, status):
    assert exchange(address, request_bytes).split()[1] == status


def test_client_that_sends_no_request_is_disconnected(monkeypatch):
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.5)
    with served(application()) as address:
        assert exchange(address, b"GET / HTTP/1.1\r\nHost: local") == b""
        with connect(address) as client:  # a whole request, then nothing
            client.sendall(get().replace(b"Connection: close\r\n", b""))
            assert read_all(client).endswith(b"small")
        assert exchange(address, get()).endswith(b"small")


def test_client_that_does_not_read_the_answer_is_disconnected(monkeypatch):
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.5)
    with served(application()) as address:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect(address)
        slow.sendall(get("/large"))
        assert exchange(address, get()).endswith(b"small")
        time.sleep(1.5)  # longer than the deadline: what arrives afterwards is what was under way
        assert len(read_all(slow)) < len(LARGE)
        slow.close()


def test_number_of_connections_is_limited(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 5)
    with served(application()) as address:
        silent = [connect(address) for _ in range(5)]
        try:
            with connect(address) as client:
                assert read_all(client) == b""
        finally:
            for client in silent:
                client.close()


def test_port_in_use_is_a_config_error(monkeypatch):
    monkeypatch.setattr(http_server, "BIND_SECONDS", 0.0)
    with bind("127.0.0.1", 0, "metrics.port") as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^metrics.port: 127.0.0.1:{port} cannot be served: the port is in use"):
            bind("127.0.0.1", port, "metrics.port")
    with pytest.raises(ConfigError, match="cannot be served"):
        bind("192.0.2.1", 0, "metrics.host")


def test_loopback_names():
    assert [is_loopback(host) for host in ("127.3.2.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "node7", "")] == [False] * 4
    assert [host_name(header) for header in ("a:1", "[::1]:80", "a")] == ["a", "::1", "a"]
