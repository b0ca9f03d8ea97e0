"""Ends the processes that the model or the dataset of a rank has started, once the rank has ended. Torch-free.

A rank leads a session of its own, which its children share, and its environment has a mark, which the programs that it
starts inherit. A process with either descends from the rank, whichever process is its parent by now.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

MARK = "MESHWRIGHT_DESCENDANT_OF"
"""The environment variable with the marks of all launchers and ranks that a process descends from."""
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
