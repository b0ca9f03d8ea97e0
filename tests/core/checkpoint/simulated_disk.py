"""A simulated disk in memory: it loses unsynced data at power loss, and fails at any chosen system call."""

from __future__ import annotations

import copy
import errno
import os
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from meshwright.base.store.interface import Buffer
from meshwright.base.store.posix import PosixCalls, PosixStore

SECTOR = 512
"""Bytes that a power loss leaves either all written or all zero."""


class PowerLoss(BaseException):
    """The process has been killed. It is no OSError, and every later call raises it too: no cleanup takes effect."""


@dataclass(eq=False)
class SimulatedFile:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    sync_failed: bool = False
    """After a failed sync the kernel drops the dirty pages, and a later sync succeeds without them."""


@dataclass(eq=False)
class SimulatedFolder:
    live: dict[str, SimulatedFile | SimulatedFolder] = field(default_factory=dict)
    unsynced: dict[str, list[SimulatedFile | SimulatedFolder | None]] = field(default_factory=dict)
    """The values of an entry since the last sync of the folder, the durable one first: a power loss may restore any."""

    def put(self, name: str, node: SimulatedFile | SimulatedFolder | None) -> None:
        self.unsynced.setdefault(name, []).append(self.live.pop(name, None))
        if node is not None:
            self.live[name] = node


@dataclass(frozen=True)
class DiskFault:
    """A fault at one system call.

    kill: the process is killed; error: the call fails without effect; late: the call takes effect and fails;
    part: a write writes half of its bytes and fails; short: a write writes half of its bytes and succeeds.
    """

    call: int
    kind: str
    number: int = errno.EIO

    def error(self) -> OSError:
        return OSError(self.number, os.strerror(self.number))


class SimulatedDisk(PosixCalls):
    """Reads see the live content; `crash` returns the disk as a power loss may leave it, determined by a seed."""

    def __init__(self) -> None:
        self.root = SimulatedFolder()
        self.open: dict[int, SimulatedFile] = {}
        self.last_handle = 0
        self.calls: list[str] = []
        """Every call so far, such as `write rank-00000.shard`."""
        self.fault: DiskFault | None = None
        self.fault_raised = self.killed = False
        self.before_call: Callable[[], None] = lambda: None
        """Runs before each call: a scheduler switches threads there."""

    def with_fault(self, fault: DiskFault | None = None) -> SimulatedDisk:
        """A copy with the same unsynced data, on which calls are counted from zero."""
        other = SimulatedDisk()
        other.root, other.fault = copy.deepcopy(self.root), fault
        return other

    def crash(self, seed: int) -> SimulatedDisk:
        """Seed 0 loses all unsynced data, seed 1 keeps it, and any other seed draws for each entry and each file."""
        other = SimulatedDisk()
        other.root = PowerLossOutcome(seed).folder(self.root)
        return other

    def make_folder(self, path: str) -> None:
        def apply() -> None:
            folder, name = self._parent_of_new(path)
            folder.put(name, SimulatedFolder())

        self._call("make_folder", path, apply)

    def create(self, path: str) -> int:
        def apply() -> int:
            folder, name = self._parent_of_new(path)
            file = SimulatedFile()
            folder.put(name, file)
            self.last_handle += 1
            self.open[self.last_handle] = file
            return self.last_handle

        return self._call("create", path, apply)

    def write(self, file: int, content: Buffer, offset: int) -> int:
        def apply(length: int = len(content)) -> int:
            live = self.open[file].live
            live.extend(bytes(max(0, offset - len(live))))
            live[offset : offset + length] = content[:length]
            return length

        return self._call("write", "", apply, lambda: apply(-(-len(content) // 2)))

    def set_direct(self, file: int, direct: bool) -> bool:
        return direct

    def start_thread(self) -> Executor:
        return InlineExecutor()

    def sync(self, file: int) -> None:
        def apply() -> None:
            if not self.open[file].sync_failed:
                self.open[file].durable = bytes(self.open[file].live)

        def fail() -> None:
            self.open[file].sync_failed = True

        self._call("sync", "", apply, fail)

    def close(self, file: int) -> None:
        self._call("close", "", lambda: self.open.pop(file), lambda: self.open.pop(file))

    def link(self, path: str, name: str) -> None:
        def apply() -> None:
            folder, base = self._parent_of_new(name)
            folder.put(base, self._find(path))

        self._call("link", name, apply)

    def remove(self, path: str) -> None:
        self._call("remove", path, lambda: self._remove_entry(path, SimulatedFile))

    def remove_folder(self, path: str) -> None:
        self._call("remove_folder", path, lambda: self._remove_entry(path, SimulatedFolder))

    def sync_folder(self, path: str) -> None:
        self._call("sync_folder", path, lambda: self._folder(path).unsynced.clear())

    def list_names(self, path: str) -> list[str]:
        return self._call("list_names", path, lambda: list(self._folder(path).live))

    def size(self, path: str) -> int:
        return self._call("size", path, lambda: len(self._file(path).live))

    def read(self, path: str, start: int, length: int) -> bytes:
        return self._call("read", path, lambda: bytes(self._file(path).live[start : start + length]))

    def _call(self, name: str, path: str, apply: Callable, fail: Callable = lambda: None):
        """One system call: count it, and raise the fault if it is due here; `fail` is the effect of a failed call."""
        self.before_call()
        if self.killed:
            raise PowerLoss
        call = len(self.calls)
        self.calls.append(f"{name} {os.path.basename(path)}".rstrip())
        if self.fault is None or self.fault.call != call:
            return apply()
        match self.fault.kind:
            case "kill":
                self.killed = True
                raise PowerLoss
            case "late":
                apply()
            case "short" if name == "write":
                return fail()
            case "short":
                return apply()
            case "part" if name == "write":
                fail()
            case "error" if name in ("sync", "close"):
                fail()
        self.fault_raised = True
        raise self.fault.error()

    def _find(self, path: str) -> SimulatedFile | SimulatedFolder:
        node: SimulatedFile | SimulatedFolder = self.root
        for name in path.strip("/").split("/"):
            if not isinstance(node, SimulatedFolder):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name and name not in node.live:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.live[name] if name else node
        return node

    def _folder(self, path: str) -> SimulatedFolder:
        node = self._find(path)
        if not isinstance(node, SimulatedFolder):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _file(self, path: str) -> SimulatedFile:
        node = self._find(path)
        if not isinstance(node, SimulatedFile):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return node

    def _parent_of_new(self, path: str) -> tuple[SimulatedFolder, str]:
        parent, name = os.path.split(path)
        folder = self._folder(parent)
        if name in folder.live:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return folder, name

    def _remove_entry(self, path: str, kind: type[SimulatedFile] | type[SimulatedFolder]) -> None:
        parent, name = os.path.split(path)
        node = self._find(path)
        if not isinstance(node, kind):
            raise OSError(errno.ENOTDIR if kind is SimulatedFolder else errno.EISDIR, "wrong kind of entry", path)
        if isinstance(node, SimulatedFolder) and node.live:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._folder(parent).put(name, None)


class InlineExecutor(Executor):
    """Runs every task at once, in the thread that submits it: the order of the disk calls is then always the same."""

    def submit(self, function, /, *args, **options):
        future = Future()
        try:
            future.set_result(function(*args, **options))
        except BaseException as failure:  # noqa: BLE001
            future.set_exception(failure)
        return future


class PowerLossOutcome:
    """Draws what a power loss leaves of unsynced data."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.files: dict[int, SimulatedFile] = {}

    def folder(self, folder: SimulatedFolder) -> SimulatedFolder:
        outcome = SimulatedFolder()
        for name in sorted(folder.live.keys() | folder.unsynced.keys()):
            node = self.choose([*folder.unsynced.get(name, []), folder.live.get(name)])
            if node is not None:
                outcome.live[name] = self.folder(node) if isinstance(node, SimulatedFolder) else self.file(node)
        return outcome

    def file(self, file: SimulatedFile) -> SimulatedFile:
        """The outcome of a file, the same under every name (hard link) of the file."""
        if id(file) not in self.files:
            content = self.content(file.durable, bytes(file.live))
            self.files[id(file)] = SimulatedFile(bytearray(content), content)
        return self.files[id(file)]

    def content(self, durable: bytes, live: bytes) -> bytes:
        if live == durable:
            return durable
        truncated = live[: self.rng.randrange(len(durable), len(live))]
        zeroed = bytearray(live)
        for start in range(len(durable) - len(durable) % SECTOR, len(live), SECTOR):
            if self.rng.random() < 0.5:
                sector = slice(max(start, len(durable)), min(start + SECTOR, len(live)))
                zeroed[sector] = bytes(sector.stop - sector.start)
        return self.choose([durable, truncated, bytes(zeroed), live])

    def choose(self, outcomes: list):
        """Choose among the outcomes, which are ordered from the durable to the newest."""
        if self.seed < 2:
            return outcomes[-self.seed]
        return self.rng.choice(outcomes)


def open_store(disk: SimulatedDisk) -> PosixStore:
    return PosixStore("/", disk)
