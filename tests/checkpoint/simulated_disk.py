"""A disk in memory that forgets what was not synced, loses power at any call and fails as it is told."""

from __future__ import annotations

import copy
import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.store.interface import Buffer
from meshwright.store.posix import PosixCalls, PosixStore

SECTOR = 512
"""Bytes that are written or zero together when a page was on its way at power loss."""


class PowerLoss(BaseException):
    """Everything that a process may still want to do ends here: no `except OSError`, no clean-up takes effect."""


@dataclass(eq=False)
class File:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    doomed: bool = False
    """a sync has failed: the kernel has dropped the dirty pages, and a later sync succeeds without them"""


@dataclass(eq=False)
class Folder:
    live: dict[str, File | Folder] = field(default_factory=dict)
    before: dict[str, list[File | Folder | None]] = field(default_factory=dict)
    """what an entry has been since the folder was synced, the durable value first; any of them may come back"""

    def put(self, name: str, node: File | Folder | None) -> None:
        self.before.setdefault(name, []).append(self.live.pop(name, None))
        if node is not None:
            self.live[name] = node


@dataclass(frozen=True)
class Trouble:
    """What goes wrong at one call.

    kill: the process ends there; error: it fails and does nothing; late: it does its work and fails;
    part: a write leaves half of its bytes and fails; short: a write takes half of its bytes.
    """

    at: int
    kind: str
    number: int = errno.EIO

    def error(self) -> OSError:
        return OSError(self.number, os.strerror(self.number))


class SimulatedDisk(PosixCalls):
    """Reads see what is live; `crash` gives the disk as power loss may leave it, decided by a seed."""

    def __init__(self) -> None:
        self.top = Folder()
        self.open: dict[int, File] = {}
        self.opened = 0
        self.done: list[str] = []
        """every call so far, as `write rank-00000.shard`"""
        self.trouble: Trouble | None = None
        self.struck = self.dead = False
        self.turn: Callable[[], None] = lambda: None
        """called before each call: where other threads get their turn"""

    def with_trouble(self, trouble: Trouble | None = None) -> SimulatedDisk:
        """A copy, un-synced things still un-synced, on which calls are counted anew."""
        other = SimulatedDisk()
        other.top, other.trouble = copy.deepcopy(self.top), trouble
        return other

    def crash(self, seed: int) -> SimulatedDisk:
        """Seed 0 loses all that was not synced, seed 1 keeps it all, any other draws for each entry and each file."""
        other = SimulatedDisk()
        other.top = Remains(seed).folder(self.top)
        return other

    # The calls.

    def make_folder(self, path: str) -> None:
        def work() -> None:
            folder, name = self._absent(path)
            folder.put(name, Folder())

        self._call("make_folder", path, work)

    def create(self, path: str) -> int:
        def work() -> int:
            folder, name = self._absent(path)
            file = File()
            folder.put(name, file)
            self.opened += 1
            self.open[self.opened] = file
            return self.opened

        return self._call("create", path, work)

    def write(self, file: int, content: Buffer) -> int:
        def work(length: int = len(content)) -> int:
            self.open[file].live += content[:length]
            return length

        return self._call("write", "", work, lambda: work(-(-len(content) // 2)))

    def sync(self, file: int) -> None:
        def work() -> None:
            if not self.open[file].doomed:
                self.open[file].durable = bytes(self.open[file].live)

        def failing() -> None:
            self.open[file].doomed = True

        self._call("sync", "", work, failing)

    def close(self, file: int) -> None:
        self._call("close", "", lambda: self.open.pop(file), lambda: self.open.pop(file))

    def link(self, path: str, name: str) -> None:
        def work() -> None:
            folder, base = self._absent(name)
            folder.put(base, self._find(path))

        self._call("link", name, work)

    def remove(self, path: str) -> None:
        self._call("remove", path, lambda: self._take_out(path, File))

    def remove_folder(self, path: str) -> None:
        self._call("remove_folder", path, lambda: self._take_out(path, Folder))

    def sync_folder(self, path: str) -> None:
        self._call("sync_folder", path, lambda: self._folder(path).before.clear())

    def list_names(self, path: str) -> list[str]:
        return self._call("list_names", path, lambda: list(self._folder(path).live))

    def size(self, path: str) -> int:
        return self._call("size", path, lambda: len(self._file(path).live))

    def read(self, path: str, start: int, length: int) -> bytes:
        return self._call("read", path, lambda: bytes(self._file(path).live[start : start + length]))

    # How they are made.

    def _call(self, name: str, path: str, work: Callable, failing: Callable = lambda: None):
        """One system call: counted, and failing where it was told to; `failing` is what an error leaves behind."""
        self.turn()
        if self.dead:
            raise PowerLoss
        at = len(self.done)
        self.done.append(f"{name} {os.path.basename(path)}".rstrip())
        if self.trouble is None or self.trouble.at != at:
            return work()
        match self.trouble.kind:
            case "kill":
                self.dead = True
                raise PowerLoss
            case "late":
                work()
            case "short" if name == "write":
                return failing()
            case "short":
                return work()
            case "part" if name == "write":
                failing()
            case "error" if name in ("sync", "close"):
                failing()
        self.struck = True
        raise self.trouble.error()

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.top
        for part in path.strip("/").split("/"):
            if not isinstance(node, Folder):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if part and part not in node.live:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.live[part] if part else node
        return node

    def _folder(self, path: str) -> Folder:
        node = self._find(path)
        if not isinstance(node, Folder):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _file(self, path: str) -> File:
        node = self._find(path)
        if not isinstance(node, File):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return node

    def _absent(self, path: str) -> tuple[Folder, str]:
        above, name = os.path.split(path)
        folder = self._folder(above)
        if name in folder.live:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return folder, name

    def _take_out(self, path: str, kind: type[File] | type[Folder]) -> None:
        above, name = os.path.split(path)
        node = self._find(path)
        if not isinstance(node, kind):
            raise OSError(errno.ENOTDIR if kind is Folder else errno.EISDIR, "the other kind", path)
        if isinstance(node, Folder) and node.live:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._folder(above).put(name, None)


class Remains:
    """What a power loss leaves of everything that was not synced."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.known: dict[int, File] = {}

    def folder(self, folder: Folder) -> Folder:
        left = Folder()
        for name in sorted(folder.live.keys() | folder.before.keys()):
            node = self.choose([*folder.before.get(name, []), folder.live.get(name)])
            if node is not None:
                left.live[name] = self.folder(node) if isinstance(node, Folder) else self.file(node)
        return left

    def file(self, file: File) -> File:
        """The same for every name that the file has."""
        if id(file) not in self.known:
            content = self.content(file.durable, bytes(file.live))
            self.known[id(file)] = File(bytearray(content), content)
        return self.known[id(file)]

    def content(self, durable: bytes, live: bytes) -> bytes:
        if live == durable:
            return durable
        torn = live[: self.rng.randrange(len(durable), len(live))]
        holed = bytearray(live)
        for start in range(len(durable) - len(durable) % SECTOR, len(live), SECTOR):
            if self.rng.random() < 0.5:
                zeroed = slice(max(start, len(durable)), min(start + SECTOR, len(live)))
                holed[zeroed] = bytes(zeroed.stop - zeroed.start)
        return self.choose([durable, torn, bytes(holed), live])

    def choose(self, outcomes: list):
        """From the durable one to the newest."""
        if self.seed < 2:
            return outcomes[-self.seed]
        return self.rng.choice(outcomes)


def store_on(disk: SimulatedDisk) -> PosixStore:
    return PosixStore("/", disk)
