"""Ends the processes that the model or the dataset of a rank has started, once the rank has ended. Torch-free.

A rank leads a session of its own, which its children share, and its environment has a mark, which the programs that it
starts inherit. A process with either descends from the rank, whichever process is its parent by now.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

MARK = "MESHWRIGHT_DESCENDANT_OF"
"""The environment variable with the marks of all launchers and ranks that a process descends from."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
MAX_SCANS = 100
"""Scans after which processes that fork faster than they are killed are given up."""


def with_mark(mark: str) -> str:
    """The value of the environment variable for a process that descends from this one and from the owner of `mark`."""
    return f"{os.environ.get(MARK, '')}{mark};"


def lead_session(mark: str) -> None:
    """Makes this process the leader of a new session, and marks the programs that it starts."""
    os.setsid()
    os.environ[MARK] = with_mark(mark)


def end_descendants(mark: str, session: int = 0) -> None:
    """Kills every process that has the mark or belongs to the session."""
    for _ in range(MAX_SCANS):
        descendants = find_descendants(mark, session)
        if not descendants:
            return
        for pid in descendants:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


@contextmanager
def orphans_ended() -> Iterator[None]:
    """Kills, at the end, every process that was started inside and remains, also in a session of its own: on Linux,
    this process becomes the parent of those whose parent has ended. No other thread may start a process meanwhile.
    """
    if sys.platform != "linux":
        yield
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int(0)
    known = set(find_children().get(os.getpid(), ()))
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_children(known)
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


def end_children(known: set[int]) -> None:
    """Kills and reaps the children of this process that are not known, with all of their descendants."""
    for _ in range(MAX_SCANS):
        children = find_children()
        found = [pid for pid in children.get(os.getpid(), ()) if pid not in known]
        if not found:
            return
        tree = list(found)
        for pid in tree:  # grows while it is walked
            tree += children.get(pid, ())
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        for pid in found:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def find_children() -> dict[int, list[int]]:
    """The processes of this machine by their parent. Those that have ended and were not reaped are among them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    return children


class DescendantGuard:
    """A process that ends the descendants of ranks if this process is killed and cannot do it itself.

    Args:
        ranks: the mark and the session of every rank.
    """

    def __init__(self, ranks: list[tuple[str, int]]) -> None:
        reader, self._writer = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(self._writer)
            raise
        if not self._pid:
            guard_descendants(reader, ranks)
        os.close(reader)

    def release(self) -> None:
        """Ends the guard: the ranks have ended, and so have their descendants."""
        if self._pid:
            with suppress(OSError):
                os.write(self._writer, b"0")
            os.close(self._writer)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def guard_descendants(reader: int, ranks: list[tuple[str, int]]) -> NoReturn:
    """Waits until the other end of a pipe is closed, which happens when its process ends, and ends the descendants."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(reader, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        close_inherited_files()
        if not os.read(0, 1):
            for mark, session in ranks:
                end_descendants(mark, session)
    finally:
        os._exit(0)


def close_inherited_files() -> None:
    """Closes every file but the standard streams: the files of the launcher must not stay open in the guard."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the list itself was one of them
                os.close(int(name))


def find_descendants(mark: str, session: int) -> list[int]:
    """The processes that have the mark or belong to the session and have not ended."""
    variable, pids = f"{MARK}=".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError, IndexError):  # the process has ended, or belongs to somebody else
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, _, process_session, *_ = file.read().rpartition(b")")[2].split()
            if state in (b"Z", b"X"):
                continue
            if session and int(process_session) == session:
                pids.append(int(name))
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                marks = [entry for entry in file.read().split(b"\0") if entry.startswith(variable)]
            if any(f"{mark};".encode() in entry for entry in marks):
                pids.append(int(name))
    return pids
