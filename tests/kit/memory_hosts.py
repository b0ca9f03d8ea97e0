"""Hosts that keep snapshots, as listeners of this process: each has the folder and the connections of a supervisor."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.channel import Connection, Listener
from meshwright.core.store.memory.client import KeeperAddress
from meshwright.core.store.memory.keeper import SnapshotKeeper
from meshwright.core.store.memory.peer_store import PeerMemoryStore
from meshwright.core.store.memory.session import KeeperSession, decode_hello

SECRET = b"0123456789abcdef0123456789abcdef"


class MemoryHost:
    """A host whose keeper can be reached until it is lost."""

    def __init__(self, name: str, folder: Path, limit: int = 1 << 24) -> None:
        folder.mkdir()
        self.name, self.keeper = name, SnapshotKeeper(folder, limit)
        self.connections: list[Connection] = []
        self.listener = Listener("127.0.0.1", SECRET, self._serve)

    def _serve(self, connection: Connection) -> None:
        self.connections.append(connection)
        if (attempt := decode_hello(connection.receive())) is not None:
            KeeperSession(self.keeper, connection, attempt).serve()

    @property
    def address(self) -> KeeperAddress:
        return KeeperAddress(self.name, "127.0.0.1", self.listener.port)

    def lose(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


class MemoryHosts:
    """The hosts of a job."""

    def __init__(self, base: Path, names: str = "abc", limit: int = 1 << 24) -> None:
        self.hosts = {name: MemoryHost(name, base / f"memory-{name}", limit) for name in names}

    def store(self, attempt: int = 1, own: str = "a", names: str = "") -> PeerMemoryStore:
        """The store as a rank on host `own` sees it, in an attempt on these hosts."""
        names = names or "".join(self.hosts)
        return PeerMemoryStore([self.hosts[name].address for name in names], names.index(own), attempt, SECRET)

    def __getitem__(self, name: str) -> MemoryHost:
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            host.lose()
