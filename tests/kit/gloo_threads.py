"""Lets Gloo's threads release the tensors of a message before a test counts memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from meshwright.core.torch_private import wrap_collective_waits

THREADS = "pt_gloo_runloop"
POLL = 0.0005
DEADLINE = 10.0


def release_messages_at_once() -> None:
    """Makes this process wait, after every wait for a collective, until Gloo's threads are idle.

    A thread of Gloo reports that a collective is complete before it releases the collective's tensors. If another
    process gets the core in between, this process goes on while the tensors are still in memory, and its peak is higher
    than in other runs.
    """
    wrap_collective_waits(wait_until_released)


def wait_until_released(wait: Any, *args: Any, **kwargs: Any) -> Any:
    result = wait(*args, **kwargs)
    deadline, idle = time.monotonic() + DEADLINE, 0
    while idle < 2 and time.monotonic() < deadline:  # twice: a thread may have waited for the interpreter lock
        time.sleep(POLL)
        idle = idle + 1 if gloo_is_idle() else 0
    return result


def gloo_is_idle() -> bool:
    """Whether no thread of Gloo runs, or would run if it had a core."""
    states = [(path / "stat").read_text().rpartition(")") for path in Path("/proc/self/task").iterdir()]
    return all(after.split()[0] == "S" for before, _, after in states if before.endswith(f"({THREADS}"))
