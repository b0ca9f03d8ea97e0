"""What every HTTP server of Meshwright enforces: known hosts, safe headers, and no writes without a token. Torch-free.

The servers bind to localhost, but a page of another site in the user's browser can send requests there too. It cannot
read the answers: no CORS header is sent, and a request whose Host is not an address of this machine is rejected, so
that a foreign name that resolves to 127.0.0.1 (DNS rebinding) does not make it the same origin.

A server with a token accepts POST requests of its own page: they carry the token, which only that page can read, the
Origin of the same server, and a bounded body of JSON.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

MAX_URL_BYTES = 2048
"""The longest path with its query that is read."""
METHODS = ("GET", "HEAD")
MAX_BODY_BYTES = 16 << 10
"""The longest body of a POST request."""
TOKEN_HEADER = b"x-meshwright-token"
ALL_INTERFACES = ("0.0.0.0", "::")
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""The headers of every answer: a page loads nothing from elsewhere, and is not shown inside of other pages."""


class RequestGuard:
    """ASGI middleware that answers requests it does not accept, and adds HEADERS to every answer.

    Args:
        app: the application behind it.
        host: the address that the server is bound to. The names of this machine are accepted in addition; if the server
            is bound to all interfaces, every numeric address is accepted as well.
        token: what POST requests must carry; an empty one rejects them all.
    """

    def __init__(self, app: AsgiApp, host: str, token: str = "") -> None:
        self.app, self.host, self.token = app, host, token
        self.methods = (*METHODS, "POST") if token else METHODS

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: there is none
            await send({"type": "websocket.close", "code": 1000})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        rejection = self.rejection(scope)
        if rejection is None:
            await self.app(scope, receive, send_with_headers)
            return
        status, text = rejection
        body = f"{text}\n".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", ", ".join(self.methods).encode()))
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send_with_headers({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def rejection(self, scope: Message) -> tuple[int, str] | None:
        """Returns the status and the reason why a request is not accepted, or None."""
        if scope["method"] not in self.methods:
            return 405, f"the method is not accepted: expected {' or '.join(self.methods)}"
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_URL_BYTES:
            return 414, f"the address is longer than {MAX_URL_BYTES} bytes"
        hosts = [value for name, value in scope.get("headers", ()) if name == b"host"]
        if len(hosts) != 1 or not is_own_host(hosts[0].decode("latin-1"), self.host):
            return 421, "the Host header is not an address of this server: try the address that was printed"
        return self.write_rejection(scope, hosts[0]) if scope["method"] == "POST" else None

    def write_rejection(self, scope: Message, host: bytes) -> tuple[int, str] | None:
        """Returns why a POST request is not accepted: its origin, its token or its body. A body without a length could
        be endless, and a simple form of another site cannot have the type JSON.
        """
        headers: dict[bytes, bytes] = dict(scope.get("headers", ()))
        if headers.get(b"origin", b"") != b"http://" + host:
            return 403, "the request does not come from the page of this server"
        if not secrets.compare_digest(headers.get(TOKEN_HEADER, b""), self.token.encode()):
            return 403, "the token is not that of this server: try to load the page again"
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            return 415, "the body is not JSON"
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > 9 or b"transfer-encoding" in headers:
            return 411, "the body has no length"
        return (413, f"the body is longer than {MAX_BODY_BYTES} bytes") if int(length) > MAX_BODY_BYTES else None


def is_own_host(header: str, bound: str) -> bool:
    """Returns whether a Host header, with or without a port, names this machine or the address that was bound."""
    name = host_name(header)
    if bound in ALL_INTERFACES and (is_numeric_address(name) or name == socket.gethostname().lower()):
        return True
    return name in ("localhost", "127.0.0.1", "::1", bound.lower())


def is_numeric_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_name(header: str) -> str:
    """Returns the host of a Host header in lower case, without its port and without the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
