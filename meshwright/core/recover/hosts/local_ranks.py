"""The ranks of this host, started and ended as the leader says, whichever host leads. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.member import (
    KillRank,
    KillRanks,
    LeaveJob,
    Member,
    SignalRanks,
    StartRanks,
)
from meshwright.core.recover.hosts.messages import Message
from meshwright.core.recover.hosts.rank_readings import RankReadings
from meshwright.core.recover.running_ranks import RunningRanks
from meshwright.errors import MeshwrightError

KILL_SECONDS, KILL_FRACTION = 3.0, 0.2
"""Seconds that killed ranks have to end, and the largest fraction of the timeout of a host that this may take."""


class LocalLauncher(Protocol):
    """Starts the ranks of this host."""

    def start(self, attempt: int, restart: int, placement: HostPlacement | None = None) -> RunningRanks: ...


class LocalRanks:
    """Does what a `Member` says, and tells it how the ranks of this host end."""

    def __init__(
        self,
        folder: RunFolder,
        launcher: LocalLauncher,
        hang_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        kill_seconds: float = 3.0,
    ) -> None:
        """`clock` is this host's monotonic clock; a simulation has clocks of its own."""
        self.folder, self.launcher, self.hang_timeout, self.clock = folder, launcher, hang_timeout, clock
        self.kill_seconds = kill_seconds
        """Seconds after which ranks that were killed, and have not ended, are killed with what forked them."""
        self.running: RunningRanks | None = None
        self.readings: RankReadings | None = None
        self.started: StartRanks | None = None
        self.kill_deadline = float("inf")
        """When ranks that were killed, and have not ended, are killed together with what started them."""

    def drive(self, member: Member) -> LeaveJob | None:
        """Performs the actions of the member; returns the one that ends this supervisor, if there is one."""
        leave = None
        while member.actions:
            match member.actions.pop(0):
                case StartRanks() as start:
                    self._start(start, member)
                case SignalRanks(number) if self.running is not None:
                    self.running.signal(number)
                case KillRanks() if self.running is not None:
                    self._kill(self.running)
                case KillRank(rank) if self.running is not None:
                    self.running.kill_rank(rank)
                case LeaveJob() as ended:
                    leave = ended
        if self.running is not None and self.clock() > self.kill_deadline:
            self.running.kill()
        if self.running is not None and self.running.poll(0):
            running, self.running = self.running, None
            self._end_readings()
            member.ranks_ended(outcome_of(running.results, killed=self.kill_deadline < float("inf")))
        return leave

    def _kill(self, running: RunningRanks) -> None:
        """Kills the ranks, not the process that forked them: it starts those of the next attempt sooner."""
        for rank in (heartbeats := running.read_heartbeats()):
            running.kill_rank(rank)
        self.kill_deadline = self.clock() + (self.kill_seconds if heartbeats else 0.0)

    def _start(self, start: StartRanks, member: Member) -> None:
        self.started, self.kill_deadline = start, float("inf")
        self.readings = RankReadings(self.folder, start.attempt, start.placement.local_ranks, self.hang_timeout)
        outcome = outcome_of(lambda: self._launch(start))
        if "error" in outcome:
            member.ranks_ended(outcome)

    def _launch(self, start: StartRanks) -> list[Any]:
        self.running = self.launcher.start(start.attempt, start.restart, start.placement)
        return [{}]

    def read(self) -> Message:
        """What a beat says about the ranks of this host."""
        return self.readings.read() if self.readings is not None else {}

    def _end_readings(self) -> None:
        if self.readings is not None:
            self.readings.close()
        self.readings = None

    def end(self) -> None:
        """Kills the ranks that still run."""
        if self.running is not None:
            self.running.kill()
            with suppress(MeshwrightError):
                self.running.results()
            self.running = None
            self._end_readings()


def outcome_of(results: Callable[[], list[Any]], killed: bool = False) -> Message:
    """How ranks ended, as JSON: their summary, their failures, or the error that kept them from starting. Failures of
    ranks that the leader had `killed` are not the root cause.
    """
    try:
        return {"summary": results()[0]}
    except RanksFailed as failed:
        failures = [replace(failure, secondary=failure.secondary or killed) for failure in failed.failures]
        return {"failures": [aged_json(failure) for failure in failures]}
    except MeshwrightError as error:
        return {"error": aged_json(Failure.from_exception(-1, error))}


def aged_json(failure: Failure) -> dict[str, Any]:
    """A failure whose time is its age in seconds: hosts have different monotonic clocks."""
    return failure.to_json() | {"time": max(0.0, time.monotonic() - failure.time)}


def failure_of_host(host: str, values: dict[str, Any], arrived: float) -> Failure:
    """A failure that a host reported, with a time of this host's clock."""
    return Failure.from_json(values | {"time": arrived - float(values["time"]), "host": host})
