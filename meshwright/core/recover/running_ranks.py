"""The ranks of an attempt as the supervisor controls them, wherever and however they were started. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from meshwright.base.records.heartbeat import HeartbeatReading


class RunningRanks(Protocol):
    """The ranks of one attempt, started by the fork server or forked from this process."""

    @property
    def launcher_pid(self) -> int:
        """The process that forks the ranks."""

    def poll(self, seconds: float) -> bool: ...

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def kill_rank(self, rank: int) -> None: ...

    def read_heartbeats(self) -> dict[int, HeartbeatReading]: ...

    def results(self) -> list[Any]: ...


class Viewer(Protocol):
    """Shows the events of an attempt while it runs."""

    def tick(self) -> None: ...

    def show(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


StartAttempt = Callable[[int, int], RunningRanks]
"""Starts the ranks of an attempt: (attempt number, restart number) -> the running ranks."""
