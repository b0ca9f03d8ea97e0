"""A virtual network: delays, partitions, and connections that break in every way that connections do. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.core.channel import ChannelError, Connection
from meshwright.core.recover.hosts.host_ranks import Inbox
from meshwright.core.recover.hosts.messages import acknowledgement, decode_message, encode_message
from tests.simulated_hosts.events import EventLoop, Process, ProcessKilled

if TYPE_CHECKING:
    from collections.abc import Callable

Path = tuple[str, str]
"""A host that sends, and one that receives."""


class Network:
    """The paths between hosts. A path that is cut holds messages back, as TCP does, until it is restored."""

    def __init__(self, loop: EventLoop, latency: Callable[[Path], float]) -> None:
        """`latency` is the delay of a message in seconds."""
        self.loop, self.latency = loop, latency
        self.cut: dict[Path, int] = {}
        """How many faults cut each path."""
        self.extra: dict[Path, float] = {}
        """Additional delay of a path."""
        self.ends: list[SimulatedConnection] = []
        self.kept = self.messages = 0
        self.before_send: Callable[[Process], None] = lambda _process: None
        """Called before a process sends a message: a fault may kill it there."""

    def is_open(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self.cut

    def reaches(self, one: str, other: str) -> bool:
        """Whether messages pass in both directions."""
        return self.is_open(one, other) and self.is_open(other, one)

    def delay(self, path: Path) -> float:
        return self.latency(path) + self.extra.get(path, 0.0)

    def cut_path(self, path: Path) -> None:
        self.cut[path] = self.cut.get(path, 0) + 1

    def restore_path(self, path: Path) -> None:
        self.cut[path] -= 1
        if not self.cut[path]:
            del self.cut[path]
            for end in self.ends:
                if end.path == path:
                    end.release()

    def connect(
        self, client: str, client_process: Process, client_inbox: Inbox, server: str, process: Process, inbox: Inbox
    ) -> SimulatedConnection:
        """The client's end of a new connection."""
        near = SimulatedConnection(self, (client, server), client_process, client_inbox)
        far = SimulatedConnection(self, (server, client), process, inbox)
        near.peer, far.peer = far, near
        if len(self.ends) > 2 * self.kept + 16:
            self.ends = [end for end in self.ends if not end.is_gone]
            self.kept = len(self.ends)
        self.ends += [near, far]
        return near


class SimulatedConnection(Connection):
    """One end of a connection. Messages arrive in order, or not at all after the connection has broken."""

    peer: SimulatedConnection

    def __init__(self, network: Network, path: Path, process: Process, inbox: Inbox) -> None:
        self.network, self.path, self.process, self.inbox = network, path, process, inbox
        self.open = True
        """Whether this end has not been closed, and does not know that the other one has."""
        self.broken = False
        """Whether what this end sends is lost."""
        self.held: list[bytes | None] = []
        self.last_arrival = 0.0

    @property
    def is_gone(self) -> bool:
        return not self.open and not self.held

    def send(self, payload: bytes) -> None:
        if not self.open:
            raise ChannelError("the connection was lost")
        self.network.before_send(self.process)
        if not self.process.alive:
            raise ProcessKilled
        self.network.messages += 1
        self._transmit(payload)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._transmit(None)

    def _transmit(self, payload: bytes | None) -> None:
        """Sends a message, or the end of the connection (None)."""
        if self.broken:
            return
        if self.held or self.path in self.network.cut:
            self.held.append(payload)
            return
        loop = self.network.loop
        self.last_arrival = max(self.last_arrival, loop.now + self.network.delay(self.path))
        loop.at(self.last_arrival, self.peer.arrive, payload)

    def release(self) -> None:
        held, self.held = self.held, []
        for payload in held:
            self._transmit(payload)

    def arrive(self, payload: bytes | None) -> None:
        if self.peer.broken:  # lost in flight
            return
        if not self.process.alive:
            if (
                payload is not None and self.peer.open and not self.broken
            ):  # a host that runs refuses data for a process that has ended
                self.network.loop.after(self.network.delay(self.path), self.peer.see_end)
            return
        self.process.receive(lambda: self._receive(payload))

    def _receive(self, payload: bytes | None) -> None:
        """What the thread of a connection does (`receive_messages`)."""
        if not self.open:
            return
        if payload is None:
            self.see_end()
            return
        message = decode_message(payload)
        if message["kind"] == "beat":
            try:
                self.send(encode_message(acknowledgement(message)))
            except ProcessKilled:
                return
        self.inbox.put((self, message, self.process.clock()))
        self.process.poke()

    def see_end(self) -> None:
        """This end learns that the connection has ended."""
        if self.open and self.process.alive:
            self.open = False
            self.process.receive(self._report_end)

    def _report_end(self) -> None:
        self.inbox.put((self, None, self.process.clock()))
        self.process.poke()

    def break_(self, near_sees: bool, far_sees: bool) -> None:
        """Loses all messages from now on, and those in flight; each end may learn of it, or not."""
        self.broken = self.peer.broken = True
        self.held, self.peer.held = [], []
        for end, sees in ((self, near_sees), (self.peer, far_sees)):
            if sees:
                self.network.loop.after(self.network.latency(end.path), end.see_end)
