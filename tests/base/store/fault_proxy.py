"""An HTTP proxy in front of an S3 server that injects faults: errors, lost answers, stale listings, slow links."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

BLOCK = 1 << 16
"""The bytes that pass the link at a time."""
CODES = {403: "AccessDenied", 409: "ConditionalRequestConflict", 501: "NotImplemented", 503: "SlowDown"}
HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "content-length")


@dataclass
class Fault:
    """What happens to requests of a method whose path and query contain a text, `times` times."""

    action: str
    """error: answer with `status`, cut: close the connection after the server has done the request, drop:
    before it has, slow: wait `seconds` first, unconditional: remove the header If-None-Match.
    """
    method: str = "PUT"
    contains: str = ""
    times: int = 1
    status: int = 500
    seconds: float = 0.0


@dataclass
class Request:
    method: str
    path: str
    status: int


@dataclass
class FaultProxy:
    """Faults are added while it runs; `requests` lists what has passed."""

    upstream_port: int
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    frozen: dict[str, tuple[int, list[tuple[str, str]], bytes]] | None = None
    """The answers to listings while they are frozen."""
    rate: float = 0.0
    """The bytes per second of the link that all connections share, 0 without a limit."""

    def __post_init__(self) -> None:
        self.lock, self.link = threading.Lock(), threading.Lock()
        proxy = self

        class Handler(ProxyHandler):
            owner = proxy

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def freeze_listings(self) -> None:
        """From now on a listing that was answered once has the same answer again."""
        self.frozen = {}

    def take_faults(self, method: str, path: str) -> list[Fault]:
        taken = []
        with self.lock:
            for fault in list(self.faults):
                if fault.method in ("*", method) and fault.contains in path:
                    fault.times -= 1
                    taken.append(fault)
                    if not fault.times:
                        self.faults.remove(fault)
        return taken

    def pass_bytes(self, size: int) -> None:
        """Wait as long as the link takes for so many bytes."""
        if self.rate:
            with self.link:
                time.sleep(size / self.rate)

    def count(self, method: str, contains: str = "") -> int:
        return sum(request.method == method and contains in request.path for request in self.requests)


class ProxyHandler(BaseHTTPRequestHandler):
    """Passes a request on, unless a fault says otherwise."""

    owner: FaultProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle_request(self) -> None:
        body = b"".join(self.receive(int(self.headers.get("Content-Length") or 0)))
        faults = self.owner.take_faults(self.command, self.path)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        for fault in faults:
            if fault.action == "slow":
                time.sleep(fault.seconds)
            elif fault.action == "unconditional":
                headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
            elif fault.action == "error":
                code = CODES.get(fault.status, "InternalError")
                secret = "<StringToSign>the-secret-of-the-user</StringToSign>"
                self.answer(fault.status, [], f"<Error><Code>{code}</Code>{secret}</Error>".encode())
                return
        if any(fault.action == "drop" for fault in faults):
            self.hang_up(0)
            return
        status, answer_headers, content = self.pass_on(body, headers)
        if any(fault.action == "cut" for fault in faults):
            self.hang_up(status)
            return
        self.answer(status, answer_headers, content)

    def receive(self, length: int) -> Iterator[bytes]:
        """The body of a request, as fast as the link is."""
        while length > 0:
            block = self.rfile.read(min(BLOCK, length))
            self.owner.pass_bytes(len(block))
            length -= len(block) or length  # the client has closed the connection
            yield block

    def hang_up(self, status: int) -> None:
        self.owner.requests.append(Request(self.command, self.path, status))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def pass_on(self, body: bytes, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
        listing = self.command == "GET" and "list-type" in parse_qs(urlsplit(self.path).query)
        if listing and self.owner.frozen is not None and self.path in self.owner.frozen:
            return self.owner.frozen[self.path]
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.upstream_port, timeout=30)
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            answer = response.status, response.getheaders(), response.read()
        finally:
            connection.close()
        if listing and self.owner.frozen is not None:
            self.owner.frozen[self.path] = answer
        return answer

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.owner.requests.append(Request(self.command, self.path, status))
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        for name, value in headers:
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
        self.end_headers()
        for start in range(0, len(content) if self.command != "HEAD" else 0, BLOCK):
            self.owner.pass_bytes(len(content[start : start + BLOCK]))
            self.wfile.write(content[start : start + BLOCK])

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request
