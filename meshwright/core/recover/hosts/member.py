"""The supervisor of one host as a member of the job: it runs the ranks that the leader places on it. Torch-free.

The class has no clock, no sockets and no processes: it is told what happens and when, and says what to do. A simulation
drives it exactly as the supervisor does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.messages import Message

BEAT_SECONDS = 1.0
FENCE_FRACTION = 0.6
"""A member gives up the leader after this fraction of the timeout after which the leader gives up the member: its ranks
have then ended before others replace them.
"""


@dataclass(frozen=True)
class StartRanks:
    attempt: int
    restart: int
    placement: HostPlacement


@dataclass(frozen=True)
class SignalRanks:
    number: int


@dataclass(frozen=True)
class KillRanks:
    """Kill all ranks of this host."""


@dataclass(frozen=True)
class KillRank:
    rank: int


@dataclass(frozen=True)
class LeaveJob:
    """End this supervisor."""

    exit_code: int
    reason: str


Action = StartRanks | SignalRanks | KillRanks | KillRank | LeaveJob


@dataclass
class Member:
    """One host's part in the job, while it follows one leader."""

    host: str
    token: str
    address: str
    control_port: int
    """The port at which this supervisor listens."""
    host_timeout: float
    free_port: Callable[[], int]
    """A port of this host that is free: the store of the next process group may be served there."""
    is_leader: bool = False
    """Whether the leader is this process: it cannot lose itself."""
    outbox: list[Message] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    attempt: int = 0
    """The attempt of the ranks that run here; 0 while none run."""
    newest_attempt: int = 0
    """The newest attempt that the leader has named. Messages of earlier ones are ignored."""
    beats: int = 0
    next_beat: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)
    """When each beat that is not acknowledged yet was sent."""
    heard: float = 0.0
    """When the newest acknowledged beat was sent."""
    lost: str = ""
    """Why this host has no leader any more."""

    def join(self, now: float) -> None:
        """A connection to the leader exists."""
        self.heard = now
        self.outbox.append(
            {
                "kind": "join",
                "host": self.host,
                "token": self.token,
                "address": self.address,
                "control_port": self.control_port,
                "port": self.free_port(),
                "attempt": self.attempt,
            }
        )

    def receive(self, message: Message) -> None:
        """Handles a message of the leader."""
        match message["kind"]:
            case "welcome":
                self.newest_attempt = max(self.newest_attempt, message["attempt"])
            case "refuse":
                self.lose_leader(message["reason"])  # a host of the same name may be about to be lost
            case "acknowledge":
                self.heard = max(self.heard, self.sent.pop(message["number"], 0.0))
                self.sent = {number: at for number, at in self.sent.items() if number > message["number"]}
            case "start" if message["attempt"] >= self.newest_attempt and not self.attempt:
                placement = HostPlacement.from_json(message["placement"])
                self.attempt = self.newest_attempt = message["attempt"]
                self.actions.append(StartRanks(self.attempt, message["restart"], placement))
            case "stop" if message["attempt"] == self.attempt:
                self.actions.append(SignalRanks(message["signal"]))
            case "kill" if message["attempt"] == self.attempt:
                self.actions.append(KillRanks())
            case "kill_rank" if message["attempt"] == self.attempt:
                self.actions.append(KillRank(message["rank"]))
            case "exit":
                self.actions.append(LeaveJob(message["exit_code"], message["reason"]))

    def tick(self, now: float, ranks: Callable[[], Message] = dict) -> None:
        """Sends the next beat if it is due, with what `ranks` says about the ranks of this host, and gives up a leader
        that acknowledges none. A leader that was given up gets no beat: it must not count on this host.
        """
        if now >= self.next_beat and not self.lost:
            self.next_beat = now + BEAT_SECONDS
            self.beats += 1
            self.sent[self.beats] = now
            beat = {"kind": "beat", "number": self.beats, "attempt": self.attempt, "ranks": ranks()}
            self.outbox.append(beat | {"port": self.free_port()})
        if not self.is_leader and now - self.heard > FENCE_FRACTION * self.host_timeout:
            self.lose_leader(f"the leader has acknowledged no heartbeat of this host for {now - self.heard:.1f} s")

    def lose_leader(self, reason: str) -> None:
        """The leader is gone, or cannot hear this host: the ranks of this host end before others replace them."""
        if self.lost:
            return
        self.lost = reason
        if self.attempt:
            self.actions.append(KillRanks())

    def ranks_ended(self, outcome: Message) -> None:
        """The ranks of this host have ended: reports their summary or their failures."""
        self.outbox.append({"kind": "ended", "attempt": self.attempt, "outcome": outcome})
        self.attempt = 0
