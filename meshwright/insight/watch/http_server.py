"""Serves an ASGI application in a thread of this process, with bounds on connections. Torch-free."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Any

from meshwright.errors import ConfigError
from meshwright.insight.watch.security import ALL_INTERFACES, AsgiApp, RequestGuard

PORTS_TRIED = 20
"""Ports from the preferred one upwards that are tried before the system chooses one."""

NICENESS = 10
"""The server yields the processors to the ranks that train on the same machine."""


def bind(host: str, port: int | None, preferred: int) -> socket.socket:
    """Binds a listening socket to `port`, or without one to the first free port from `preferred` upwards."""
    ports = [port] if port is not None else [*range(preferred, preferred + PORTS_TRIED), 0]
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}", "try --host 127.0.0.1") from None
    for candidate in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address[0], candidate))
            listening.listen(256)
        except (OSError, OverflowError) as error:
            listening.close()
            if port is None and isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                continue
            reason = error.strerror if isinstance(error, OSError) else "not a port"
            hint = (
                "try another --port, or none: the next free one is used" if port is not None else "try another --host"
            )
            raise ConfigError(f"{host} port {candidate} cannot be used: {reason}", hint) from None
        return listening
    raise ConfigError(f"{host} has no free port", "try --port N")


class HttpServer:
    """Serves an application behind a RequestGuard in a daemon thread, until `stop`.

    A failure of the server never reaches the rest of the process: `failure` says what happened. With a `token`, POST
    requests that carry it are accepted; without one the server only reads.
    """

    def __init__(
        self,
        app: AsgiApp,
        host: str = "127.0.0.1",
        port: int | None = None,
        preferred: int = 8321,
        token: str = "",
    ) -> None:
        import uvicorn

        from meshwright.insight.bounded_connection import BoundedConnection

        self.host, self.failure = host, ""
        self._socket = bind(host, port, preferred)
        self.port: int = self._socket.getsockname()[1]
        guard: Any = RequestGuard(app, host, token)
        self._server = uvicorn.Server(
            uvicorn.Config(
                guard,
                loop="asyncio",
                http=BoundedConnection,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=16 << 10,
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # a broken connection is no news on the terminal
        self._thread = threading.Thread(target=self._serve, name="meshwright-http", daemon=True)

    @property
    def address(self) -> str:
        """The address to open in a browser of this machine."""
        host = "127.0.0.1" if self.host in ALL_INTERFACES else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Waits until the server has ended."""
        while self._thread.is_alive():
            self._thread.join(timeout=1)

    def stop(self) -> None:
        """Ends the server and waits for its thread."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):  # on Linux the priority of this thread and of those that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._server.run(sockets=[self._socket])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the view in the terminal goes on
            if not self._server.should_exit:  # a busy machine may still serve when `stop` closes the socket
                self.failure = f"{type(error).__name__}: {error}"
