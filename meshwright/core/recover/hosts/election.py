"""Decides whether a supervisor leads the job or joins the one that does, from what it sees in the store. Torch-free.

The lease of the newest attempt says who leads. It is taken over only from a holder that has ended, or whose beat
counter in the store does not advance: a host that the network separates from a leader that lives never replaces it.
No decision reads a wall clock, or a clock of another host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class LeaseView:
    """The newest lease as a supervisor reads it from the store."""

    attempt: int
    token: str
    """The process that holds it."""
    job: str
    """The job that the attempt belongs to."""
    address: str
    """The control address of the holder, `HOST:PORT`; empty for a job on one host."""
    beats: Any
    """The holder's beat counter; only whether it changes matters."""
    outcome: str = ""
    """How the attempt ended; empty while it runs."""
    exit_code: int = 0
    final: bool = False
    """Whether no further attempt of the job follows: it is complete, was stopped, or failed for good."""


class Choice(Enum):
    """What a supervisor without a leader does next."""

    WAIT = "wait"
    TAKE = "take"
    """Publish the lease of the next attempt, and lead."""
    JOIN = "join"
    """Connect to the holder of the lease."""
    EXIT = "exit"
    """The job has ended."""
    BUSY = "busy"
    """Another job holds the run."""


class Election:
    """Observes the newest lease until it is clear who leads."""

    def __init__(self, job: str, token: str, observation: float) -> None:
        """`observation` is how many seconds the counter of a holder may stand still before it counts as dead."""
        self.job, self.token, self.observation = job, token, observation
        self.yields_until = float("-inf")
        """Until when this host leaves the lead to others, because it could not reach them."""
        self.seen: tuple[Any, ...] = ()
        self.since = 0.0
        """When what the lease shows last changed (this host's monotonic clock)."""

    def decide(self, lease: LeaseView | None, now: float) -> Choice:
        choice = self._choose(lease, now)
        return Choice.WAIT if choice is Choice.TAKE and now < self.yields_until else choice

    def forget(self) -> None:
        """The store does not answer: how long the counter has stood still is not known."""
        self.seen = ()

    def step_back(self, now: float) -> None:
        """This host could not lead: others have the time to notice that, and to take the lease."""
        self.yields_until = now + 3 * self.observation

    def _choose(self, lease: LeaseView | None, now: float) -> Choice:
        if lease is None:
            return Choice.TAKE
        advanced = self.seen[:2] == (lease.attempt, lease.token) and self.seen[2] != lease.beats
        if (shown := (lease.attempt, lease.token, lease.beats, lease.outcome)) != self.seen:
            self.seen, self.since = shown, now
        own_job = lease.job == self.job
        if lease.outcome and not own_job:
            return Choice.TAKE
        if advanced and not own_job:
            return Choice.BUSY
        if own_job and lease.final:
            return Choice.EXIT
        if own_job and lease.token == self.token:
            return Choice.TAKE  # this process led before, and nobody has taken over since
        if now - self.since >= self.observation:
            return Choice.TAKE
        # The leader takes the next lease itself after a failed attempt: others wait as long as for a silent holder.
        return Choice.WAIT if lease.outcome or not own_job or not lease.address else Choice.JOIN
