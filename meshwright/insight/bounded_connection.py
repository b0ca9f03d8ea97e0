"""An HTTP connection with deadlines for its client: silent and slow clients are disconnected. Torch-free.

A client may connect and send nothing, send its headers byte by byte, or never read the answer. uvicorn alone would keep
such connections for ever.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
"""Connections beyond this number are closed at once."""
CLIENT_SECONDS = 30.0
"""Seconds that a client has to send a request, and to read what was sent to it."""


class BoundedConnection(H11Protocol):
    """A connection that is closed if its client does not send a whole request, or does not read an answer, in time.

    An answer that streams events may take for ever, as long as its client reads them.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # it resumes writing, which sets a deadline
        self._cancel_deadline()

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
            self._deadline = None
