"""Processes of reward workers in tests: which there are, and that they end."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.rl.rewards.worker import RewardWorker


def processes_below(pid: int) -> set[int]:
    """Every process that descends from a process, and has not ended."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found, more = set(), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        found |= more
    return found


def ends_soon(pids: set[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive := {pid for pid in pids if is_running(pid)}:
        if time.monotonic() > deadline:
            raise AssertionError(f"processes {alive} are still running")
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def worker_of(reward, **settings):
    """A worker, all of whose processes end with it."""
    before = processes_below(os.getpid())
    with RewardWorker(reward, **settings) as worker:
        yield worker
        deadline = time.monotonic() + 60
        while len(started := processes_below(os.getpid()) - before) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # the server may be about to fork a worker
        assert len(started) >= 2
    assert ends_soon(started)
