"""Tests of the HTTP servers' guard: read-only, known hosts, bounded addresses, headers, and ports in use."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from meshwright.errors import ConfigError
from meshwright.insight.watch.http_server import HttpServer
from meshwright.insight.watch.security import RequestGuard, is_own_host

APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])


def client(bound: str = "127.0.0.1", host: str = "127.0.0.1:8321") -> TestClient:
    return TestClient(RequestGuard(APP, bound), base_url=f"http://{host}")


def test_every_answer_has_the_security_headers_and_no_cors():
    for answer in (client().get("/"), client().get("/missing"), client().post("/")):
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "NONSENSE"])
def test_only_reading_methods_are_accepted(method):
    answer = client().request(method, "/")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_a_long_address_is_rejected():
    assert client().get("/?" + "x" * 4096).status_code == 414


@pytest.mark.parametrize(
    ("header", "bound", "accepted"),
    [
        ("localhost:8321", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("[::1]:8321", "127.0.0.1", True),
        ("10.0.0.7:8321", "10.0.0.7", True),
        ("10.0.0.7:8321", "127.0.0.1", False),
        ("evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("evil.example", "0.0.0.0", False),
        ("192.168.1.2:80", "0.0.0.0", True),
        ("", "127.0.0.1", False),
    ],
)
def test_only_addresses_of_this_machine_are_accepted_as_host(header, bound, accepted):
    assert is_own_host(header, bound) is accepted


def test_dns_rebinding_is_answered_with_421():
    answer = client(host="evil.example").get("/")
    assert answer.status_code == 421
    assert "hello" not in answer.text


def test_server_takes_the_next_free_port_and_rejects_an_explicit_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
            HttpServer(APP, port=port)
        server = HttpServer(APP, preferred=port)
    server.start()
    try:
        assert server.port != port
        assert httpx.get(server.address, timeout=20).text == "hello"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            raw.sendall(b"\x16\x03\x01 garbage\r\n\r\n")
            assert b"400" in raw.recv(1000)
        assert httpx.get(server.address, timeout=20).text == "hello"
    finally:
        server.stop()
    assert not server.failure


def test_an_unknown_host_address_is_a_config_error():
    with pytest.raises(ConfigError, match="--host"):
        HttpServer(APP, host="no such host")
