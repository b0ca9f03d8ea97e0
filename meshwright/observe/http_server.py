"""The HTTP server of the live page and of the metrics endpoint: read-only, with bounds for hostile clients. Torch-free.

A client may connect and send nothing, send its headers byte by byte, or never read the answer. uvicorn alone would keep
such connections for ever; here every one of them has a deadline, and their number is limited.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from typing import Any

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshwright.errors import ConfigError

MAX_CONNECTIONS = 512
"""Connections beyond this number are closed at once."""
CLIENT_SECONDS = 30.0
"""Seconds that a client has to send a request, and to read what was sent to it."""
MAX_HEADER_BYTES = 16 << 10
"""Size limit of the headers of a request."""
BIND_SECONDS = 5.0
"""Seconds in which a port that is in use may become free: the server of an earlier attempt may be about to end."""


class BoundedConnection(H11Protocol):
    """A connection that is closed if its client does not send a whole request, or does not read an answer, in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        cycle = self.cycle
        super().handle_events()
        if self.cycle is not cycle:  # the headers of a request are complete
            self._wait_for_client()

    def on_response_complete(self) -> None:
        self._wait_for_client()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Sets a deadline while the next move is the client's: a request, or reading what fills the write buffer."""
        self._cancel_deadline()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering or self.flow.write_paused:
            self._deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


class LocalHostsOnly:
    """Answers only requests whose Host header names this machine, if the server is bound to a loopback address.

    A page of another site can resolve its own name to 127.0.0.1 (DNS rebinding), and would otherwise be able to read
    the answers of a server that is bound to a loopback address so that nobody outside can reach it.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.is_checked = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.is_checked:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not is_loopback(host_name(hosts[0])):
                answer = PlainTextResponse("the Host header does not name this machine; try http://127.0.0.1\n", 421)
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)


def host_name(header: str) -> str:
    """The host of a Host header, without its port and without the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a name or an address is one of this machine that cannot be reached from outside."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int, setting: str) -> socket.socket:
    """Binds a listening socket; raises ConfigError if the port is in use or the host is not one of this machine.
    `setting` is the option or config section that named them; port 0 is any free port.
    """
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except (OSError, UnicodeError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if in_use and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            reason = "the port is in use" if in_use else str(error)
            raise ConfigError(
                f"{setting}: {host}:{port} cannot be served: {reason}",
                "expected an address of this machine, and a port that is free",
            ) from None


def make_server(app: ASGIApp, host: str, **settings: Any) -> uvicorn.Server:
    """A server of an ASGI application with the bounds of this module; `run(sockets=[bind(...)])` serves it."""
    config = uvicorn.Config(
        LocalHostsOnly(app, host),
        http=BoundedConnection,
        ws="none",
        loop="asyncio",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=MAX_CONNECTIONS,
        timeout_keep_alive=int(CLIENT_SECONDS),
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **settings,
    )
    return uvicorn.Server(config)
