"""Records what a function does to a folder, and lists every state in which a crash could leave the folder.

Two kinds of crash are enumerated at every recorded call. If the process is killed, the folder is as the calls so far
left it, with the last write perhaps incomplete. If the machine loses power, only what was synced is certain: the
content of a file up to its last fsync, and the names in a folder up to the last fsync of that folder. Later names may
have reached the disk too, in order, with the data of a file missing, incomplete, or complete.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

CALLS = (
    "open write pwrite fsync fdatasync sync rename replace link symlink unlink remove mkdir rmdir truncate ftruncate"
)
"""Functions of `os` that are recorded."""
SYNCS = ("fsync", "fdatasync", "sync")
Tree = dict[str, bytes]
"""A state of the folder: relative path -> content."""
ROOT = 0


@dataclass(frozen=True)
class CrashState:
    """A state that a crash may leave, and when it happens."""

    kind: Literal["kill", "power loss"]
    after: str
    """the call after which the crash happens"""
    files: Tree
    complete: bool
    """whether the recorded function had returned"""


@dataclass
class Moment:
    """The folder after one recorded call: the entries of directories and the content of files, by identity."""

    call: str
    entries: dict[int, dict[str, int]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)


class CrashDisk:
    """Records the calls inside `record`. What exists at its beginning is taken as durable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moments: list[Moment] = []
        self._identities: dict[int, int] = {}
        self._next = ROOT
        self._synced_contents: list[dict[int, bytes]] = []
        """for every moment, the content of files at their last fsync"""
        self._synced_at: list[dict[int, int]] = []
        """for every moment, when a directory was last synced"""

    @property
    def calls(self) -> list[str]:
        """The recorded calls in their order, such as "replace .2.tmp step-2"."""
        return [moment.call for moment in self.moments[1:-1]]

    @contextmanager
    def record(self, module: ModuleType) -> Iterator[None]:
        """Records calls of `os` and `open`, also by the names under which `module` has imported them."""
        self._observe("the start")
        self._synced_contents = [dict(self.moments[0].contents)]
        self._synced_at = [dict.fromkeys(self.moments[0].entries, 0)]
        originals = [(os, name, getattr(os, name)) for name in CALLS.split()]
        originals += [(io, "open", io.open), (builtins, "open", builtins.open)]
        wrapped = {id(function): self._wrap(name, function) for _, name, function in originals}
        imported = [(module, name, value) for name, value in vars(module).items() if id(value) in wrapped]
        places: list[tuple[Any, str, Any]] = [*originals, *imported]
        for owner, name, function in places:
            setattr(owner, name, wrapped[id(function)])
        try:
            yield
        finally:
            for owner, name, function in places:
                setattr(owner, name, function)
            self._observe("the end")
            self._carry_over()

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._observe(f"{name} {' '.join(self._describe(value) for value in args[:2])}".strip())
            self._carry_over()
            if name in SYNCS:
                self._sync(os.fstat(args[0]) if args else None)
            return result

        return recorded

    def _describe(self, value: Any) -> str:
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            return "FOLDER" if path == str(self.folder) else os.path.basename(path)
        return f"{len(value)} bytes" if isinstance(value, bytes | bytearray | memoryview) else ""

    def _observe(self, call: str) -> None:
        """Adds the folder as it is now."""
        moment, present = Moment(call), set[int]()
        self._scan(str(self.folder), moment, present)
        self._identities = {inode: identity for inode, identity in self._identities.items() if inode in present}
        self.moments.append(moment)

    def _scan(self, path: str, moment: Moment, present: set[int]) -> int:
        status = os.stat(path, follow_symlinks=False)
        present.add(status.st_ino)
        if status.st_ino not in self._identities:
            self._identities[status.st_ino] = self._next
            self._next += 1
        identity = self._identities[status.st_ino]
        if stat.S_ISDIR(status.st_mode):
            names = sorted(os.listdir(path))
            moment.entries[identity] = {name: self._scan(f"{path}/{name}", moment, present) for name in names}
        elif stat.S_ISREG(status.st_mode):
            with io.FileIO(path) as file:
                moment.contents[identity] = file.readall()
        return identity

    def _carry_over(self) -> None:
        self._synced_contents.append(dict(self._synced_contents[-1]))
        self._synced_at.append(dict(self._synced_at[-1]))

    def _sync(self, status: os.stat_result | None) -> None:
        """Marks one file or folder as durable, or everything."""
        moment, now = self.moments[-1], len(self.moments) - 1
        synced = [*self._identities.values()] if status is None else [self._identities.get(status.st_ino, -1)]
        for identity in synced:
            if identity in moment.contents:
                self._synced_contents[-1][identity] = moment.contents[identity]
            if identity in moment.entries:
                self._synced_at[-1][identity] = now

    def states(self) -> Iterator[CrashState]:
        """Every state, each one once per kind of crash."""
        seen: set[tuple[str, bool, tuple[tuple[str, bytes], ...]]] = set()
        for state in self._all_states():
            key = (state.kind, state.complete, tuple(sorted(state.files.items())))
            if key not in seen:
                seen.add(key)
                yield state

    def _all_states(self) -> Iterator[CrashState]:
        last = len(self.moments) - 1
        for now, moment in enumerate(self.moments):
            state = partial(CrashState, after=moment.call, complete=now == last)
            yield state(kind="kill", files=self._tree(now, now, moment.contents))
            before = self.moments[now - 1].contents if now else moment.contents
            torn = before | {
                identity: torn_write(before.get(identity, b""), content)
                for identity, content in moment.contents.items()
                if before.get(identity) != content
            }
            if now:  # the write was before this call, so the names are still those before it
                yield CrashState(
                    "kill", f"a part of a write before {moment.call}", self._tree(now - 1, now - 1, torn), False
                )
            for names in range(now + 1):
                for contents in self._lost_contents(now):
                    yield state(kind="power loss", files=self._tree(now, names, contents))

    def _lost_contents(self, now: int) -> Iterator[dict[int, bytes]]:
        """What files may contain after a loss of power: what was synced, and of the rest nothing, a part, or all."""
        synced = self._synced_contents[now]
        current: dict[int, bytes] = {}
        for moment in self.moments[: now + 1]:
            current |= moment.contents
        for part in (0.0, 0.5, 1.0):
            yield {
                identity: content
                if part == 1.0 or synced.get(identity) == content
                else synced.get(identity, b"")
                if part == 0.0
                else torn_write(synced.get(identity, b""), content)
                for identity, content in current.items()
            }

    def _tree(self, now: int, names: int, contents: dict[int, bytes]) -> Tree:
        """The files below the folder if names are those of moment `names`, or of a later fsync of their folder."""
        files: Tree = {}

        def add(directory: int, prefix: str) -> None:
            at = max(names, self._synced_at[now].get(directory, 0))
            for name, identity in self.moments[at].entries.get(directory, {}).items():
                if any(identity in moment.entries for moment in self.moments):
                    add(identity, f"{prefix}{name}/")
                elif identity in contents:
                    files[prefix + name] = contents[identity]

        add(ROOT, "")
        return files


def torn_write(before: bytes, after: bytes) -> bytes:
    """A file of which half of the change is written."""
    if after.startswith(before):
        return after[: len(before) + (len(after) - len(before)) // 2]
    return after[: len(after) // 2]


def write_tree(folder: Path, files: Tree) -> None:
    """Writes a state into an empty folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
