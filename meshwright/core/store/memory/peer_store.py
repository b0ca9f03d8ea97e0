"""A store in the memory of the hosts of a job: each file is on the host of its rank and on the next one. Torch-free.

A manifest is on every host of the attempt that can be reached, and on two at least. What exists is known from one look
at all hosts (`collect`), before an attempt restores; the answer is the same on every rank.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from meshwright.base.store.interface import Buffer, Sink
from meshwright.core.store.memory.client import KeeperAddress, KeeperClient

T = TypeVar("T")
MIN_COPIES = 2
KEPT = 2
"""The newest snapshots that are kept: while the next one is written, the one before is complete."""
THREADS = 8
Index = dict[str, tuple[int, list[int]]]
"""The size of each file, and the hosts that have it."""


class PeerMemoryStore:
    """A `Store` whose files are in the memory of the hosts of an attempt."""

    def __init__(self, keepers: Sequence[KeeperAddress], own: int, attempt: int, secret: bytes) -> None:
        """`own` is the position of this rank's host among the hosts."""
        self.own, self.peer = own, (own + 1) % len(keepers)
        self.clients = [KeeperClient(k, secret, attempt, number == own) for number, k in enumerate(keepers)]
        self.hosts = [keeper.host for keeper in keepers]
        self.index: Index = {}
        self.unreachable: dict[str, str] = {}
        """Why a host could not be asked, by its name."""
        self.kept: list[str] = []
        """The folders of the newest snapshots, newest first."""

    def collect(self) -> Index:
        """Asks every host which files it has. A host that does not answer has none."""
        index: Index = {}
        for number, files in enumerate(self._on_all_hosts(KeeperClient.files)):
            if isinstance(files, OSError):
                self.unreachable[self.hosts[number]] = str(files)
                continue
            for name, size in files.items():
                known, hosts = index.setdefault(name, (size, []))
                if known == size:
                    hosts.append(number)
        return index

    def use(self, index: Index) -> None:
        """Takes what one rank has collected as the content of this store."""
        self.index = index
        if any(self.own in hosts for _, hosts in index.values()):
            self.clients[self.own].files()  # where they are on this host

    def hosts_of(self, names: Sequence[str]) -> list[str]:
        """The hosts that have some of these files."""
        numbers = {number for name in names if name in self.index for number in self.index[name][1]}
        return [self.hosts[number] for number in sorted(numbers)]

    def create(self, name: str) -> Sink:
        """A file on this host and on the next one."""
        return MirroredSink(self.clients[self.own].create(name), self.clients[self.peer], name)

    def publish_if_absent(self, name: str, content: bytes, before_publish: Callable[[], object] = lambda: None) -> bool:
        """Makes the manifest of a snapshot appear on all hosts, and removes older snapshots. Only rank 0 calls it."""
        before_publish()
        outcomes = self._on_all_hosts(lambda client: client.write(name, content))
        failures = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        if any(isinstance(failure, FileExistsError) for failure in failures):
            return False
        if len(outcomes) - len(failures) < min(MIN_COPIES, len(outcomes)):
            raise failures[0]
        self.kept = [name.rpartition("/")[0], *self.kept][:KEPT]
        self._on_all_hosts(lambda client: client.request("retain", folders=self.kept))
        return True

    def replace(self, name: str, content: bytes) -> None:  # noqa: ARG002
        raise OSError(errno.ENOTSUP, "a snapshot never changes", name)

    def read(self, name: str, start: int, length: int) -> bytes:
        failure: OSError = FileNotFoundError(errno.ENOENT, "no host has the file", name)
        hosts = self.index.get(name, (0, []))[1]
        for number in sorted(hosts, key=lambda number: number != self.own):
            try:
                return self.clients[number].read(name, start, length)
            except OSError as error:
                failure = error
        raise failure

    def size(self, name: str) -> int | None:
        return self.index[name][0] if name in self.index else None

    def list_names(self, folder: str) -> list[str]:
        prefix = f"{folder}/"
        return sorted({name.removeprefix(prefix).partition("/")[0] for name in self.index if name.startswith(prefix)})

    def remove(self, name: str) -> None:
        self._on_all_hosts(lambda client: client.request("remove", name=name))
        self.index.pop(name, None)

    def remove_folder(self, name: str) -> None:
        for inner in self.list_names(name):
            self.remove(f"{name}/{inner}")

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _on_all_hosts(self, call: Callable[[KeeperClient], T]) -> list[T | OSError]:
        """The result or the error of every host, in their order."""

        def attempt(client: KeeperClient) -> T | OSError:
            try:
                return call(client)
            except OSError as error:
                return error

        with ThreadPoolExecutor(min(THREADS, len(self.clients)), thread_name_prefix="memory") as threads:
            return list(threads.map(attempt, self.clients))


class MirroredSink:
    """A file that is written to this host's memory and to another's."""

    def __init__(self, local: Sink, peer: KeeperClient, name: str) -> None:
        self.sinks = [local]
        try:
            self.sinks.append(peer.create(name))
        except OSError:
            local.abort()
            raise

    def write(self, content: Buffer) -> None:
        for sink in reversed(self.sinks):  # the network first: it sends beside the copy on this host
            sink.write(content)

    def close(self) -> None:
        """Return once both hosts have the file."""
        for sink in self.sinks:
            sink.close()

    def abort(self) -> None:
        for sink in self.sinks:
            sink.abort()
