"""The supervisor that holds the lease, as the leader of the hosts: who belongs to the job, which ranks run where, which
host is lost. Torch-free.

The class has no clock, no sockets and no processes: it is told what happens and when, and says what to send. A
simulation drives it exactly as the supervisor does. The leader's own host is a member like the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.messages import Message

END_SECONDS = 15.0
"""Seconds that ranks on other hosts have to end by themselves after the first ones have failed."""


@dataclass(frozen=True)
class HostsPolicy:
    """How many hosts a job uses, and how long the leader waits for them."""

    hosts: int
    min_hosts: int
    ranks_per_host: int
    host_timeout: float
    """Seconds without a beat after which a host is lost."""
    form_timeout: float
    """Seconds that the leader waits for the hosts of the first attempt, and for the fewest that suffice later."""
    grow: bool
    """Whether a job on fewer hosts returns to its full size after a checkpoint."""
    refusal: Callable[[int], str]
    """Why the job cannot run on this number of hosts; '' if it can."""


@dataclass
class Host:
    """A host that has joined."""

    name: str
    token: str
    address: str
    control_port: int
    port: int
    """A free port, for the store of the next process group."""
    heard: float
    """When its last message arrived."""
    attempt: int = 0
    """The attempt whose ranks it runs; 0 while it is idle."""
    ranks: Message = field(default_factory=dict)
    """What its last beat said about its ranks."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of one host ended."""

    host: str
    outcome: Message
    """Summary or failures; empty for a lost host."""
    lost: str
    """Why the host is lost, '' if it is not."""
    time: float


class Leader:
    """The hosts of a job, over all attempts that this process leads."""

    def __init__(self, policy: HostsPolicy, own: str) -> None:
        self.policy, self.own = policy, own
        self.hosts: dict[str, Host] = {}
        self.blames: Counter[str] = Counter()
        """How many attempts each host has ended."""
        self.outbox: list[tuple[str, Message]] = []
        self.attempt = self.restart = 0
        self.placed: list[str] = []
        """The hosts of the attempt in the order of their ranks; empty while it forms."""
        self.placement: HostPlacement | None = None
        """The placement of the first host of the attempt."""
        self.previous: list[str] = []
        """The hosts of the attempt before."""
        self.ended: dict[str, Ended] = {}
        self.began = 0.0
        self.kill_at = float("inf")
        self.killed_at: float | None = None
        self.failure = ""
        """Why no attempt can start."""
        self.isolated = False
        """Whether this host has lost the connection to all others, so that one of them may lead better."""
        self.resizing = False
        """Whether the attempt ends so that the next one uses more hosts."""

    def begin(self, attempt: int, restart: int, now: float) -> None:
        """Begins to form the next attempt."""
        self.attempt, self.restart, self.began = attempt, restart, now
        self.placed, self.placement, self.ended = [], None, {}
        self.kill_at, self.killed_at, self.failure, self.resizing = float("inf"), None, "", False
        for host in self.hosts:
            self.outbox.append((host, {"kind": "welcome", "attempt": attempt}))

    @property
    def is_complete(self) -> bool:
        """Whether the attempt has ended on every host, or cannot start."""
        return bool(self.failure) or (bool(self.placed) and all(name in self.ended for name in self.placed))

    def receive(self, name: str, message: Message, now: float) -> None:
        """Handles a message of a host that has joined, which arrived at `now`: that moment was acknowledged to it."""
        host = self.hosts[name]
        host.heard = max(host.heard, now)
        match message["kind"]:
            case "beat":
                host.port, host.ranks = message["port"], message["ranks"] if message["attempt"] == self.attempt else {}
            case "ended":
                if host.attempt == message["attempt"]:
                    host.attempt = 0
                if message["attempt"] == self.attempt and name in self.placed and name not in self.ended:
                    self._end(Ended(name, message["outcome"], "", now), now)

    def join(self, message: Message, now: float) -> str:
        """A host joins; returns '' or why it cannot. A supervisor that was started again replaces its predecessor."""
        name, known = message["host"], self.hosts.get(message["host"])
        if name == self.own and known is not None and known.token != message["token"]:
            return f"the leader itself has the name {name}"
        if known is not None:
            if known.token != message["token"] and known.address != message["address"]:
                return f"another host, at {known.address}, has the name {name}"
            again = known.token != message["token"]
            # A supervisor ends its ranks before it joins again, even if the leader has not noticed that it was away.
            self.lose(name, f"its supervisor {'was started' if again else 'has joined'} again", now)
        self.isolated = False
        ports = message["control_port"], message["port"]
        self.hosts[name] = Host(name, message["token"], message["address"], *ports, now, message["attempt"])
        self.outbox.append((name, {"kind": "welcome", "attempt": self.attempt}))
        if message["attempt"]:  # ranks of an attempt that is over
            self.outbox.append((name, {"kind": "kill", "attempt": message["attempt"]}))
        return ""

    def lose(self, name: str, reason: str, now: float) -> None:
        """A host is lost: its connection has ended, or it is silent."""
        if self.hosts.pop(name, None) is None:
            return
        self.isolated = len(self.hosts) == 1
        if name in self.placed and name not in self.ended:
            self.blames[name] += 1
            self._end(Ended(name, {}, reason, now), now)
            self.kill_at = now  # the other ranks can only wait for those of the lost host

    def _end(self, ended: Ended, now: float) -> None:
        self.ended[ended.host] = ended
        if "summary" not in ended.outcome:
            self.kill_at = min(self.kill_at, now + END_SECONDS)

    def tick(self, now: float, checkpointed: bool = False) -> None:
        """Forms the attempt, finds silent hosts, and ends ranks that wait for lost ones. `checkpointed`: whether this
        attempt has published a checkpoint.
        """
        for host in list(self.hosts.values()):
            if host.name != self.own and now - host.heard > self.policy.host_timeout:
                self.lose(host.name, f"no heartbeat for {now - host.heard:.1f} s", now)
        if self.is_complete:
            return
        if not self.placed:
            self._form(now)
        elif now >= self.kill_at:
            self._kill(now)
        elif checkpointed and self.can_grow:
            self.resizing = True
            self.stop(15)

    def _kill(self, now: float) -> None:
        if self.killed_at is None:
            self.killed_at = now
            for name in self._running():
                self.outbox.append((name, {"kind": "kill", "attempt": self.attempt}))
        elif now - self.killed_at > self.policy.host_timeout:
            for name in self._running():
                if name != self.own:  # the leader cannot go on without its own host: it waits for those ranks
                    self.lose(name, "its ranks did not end", now)

    def kill(self, now: float) -> None:
        """Ends the ranks of all hosts."""
        self.kill_at = min(self.kill_at, now)

    def stop(self, number: int) -> None:
        """Sends a signal to the ranks: they stop at one common step, after a checkpoint."""
        for name in self._running():
            self.outbox.append((name, {"kind": "stop", "attempt": self.attempt, "signal": number}))

    def kill_rank(self, rank: int) -> None:
        if self.placement is not None:
            name = self.placed[rank // self.policy.ranks_per_host]
            self.outbox.append((name, {"kind": "kill_rank", "attempt": self.attempt, "rank": rank}))

    def exit(self, exit_code: int, reason: str, summary: Message) -> None:
        """Ends the job on every host."""
        for name in self.hosts:
            self.outbox.append((name, {"kind": "exit", "exit_code": exit_code, "reason": reason, "summary": summary}))

    def _running(self) -> list[str]:
        return [name for name in self.placed if name not in self.ended]

    def _idle(self) -> list[str]:
        return [name for name, host in self.hosts.items() if not host.attempt]

    @property
    def can_grow(self) -> bool:
        """Whether more hosts are idle than the running attempt uses, and the next one would use them."""
        available = len(self.placed) + len([name for name in self._idle() if name not in self.placed])
        return (
            self.policy.grow
            and bool(self.placed)
            and not self.resizing
            and len(self.placed) < self.policy.hosts
            and self._size(available) > len(self.placed)
        )

    def _size(self, available: int) -> int:
        """The largest number of hosts that the job can use; 0 if none."""
        sizes = range(min(available, self.policy.hosts), self.policy.min_hosts - 1, -1)
        return next((size for size in sizes if size and not self.policy.refusal(size)), 0)

    def _form(self, now: float) -> None:
        """Places the ranks once enough hosts are idle."""
        idle, waited = self._idle(), now - self.began
        patience = (
            self.policy.form_timeout if not self.restart else min(self.policy.host_timeout, self.policy.form_timeout)
        )
        if self.own not in self.hosts:
            return
        if len(idle) >= self.policy.hosts:
            self._place(idle, self.policy.hosts)
        elif waited >= patience and (size := self._size(len(idle))):
            self._place(idle, size)
        elif waited >= self.policy.form_timeout or (self.isolated and waited >= self.policy.host_timeout):
            self.failure = self._missing(idle, waited)

    def _missing(self, idle: list[str], waited: float) -> str:
        joined = f"{len(idle)} of {self.policy.hosts} host(s) are ready ({', '.join(sorted(idle)) or 'none'})"
        fewer = [size for size in range(len(idle), 0, -1) if size >= self.policy.min_hosts]
        reasons = "; ".join(f"{size} host(s): {self.policy.refusal(size)}" for size in fewer[:3])
        if not reasons and self.policy.min_hosts > len(idle):
            reasons = f"launch.min_hosts is {self.policy.min_hosts}"
        return f"{joined} after {waited:.0f} s" + (f"; {reasons}" if reasons else "")

    def _place(self, idle: list[str], size: int) -> None:
        """The own host first, so that rank 0 is beside the leader; then the hosts that ended the fewest attempts, in
        their previous order.
        """
        before = {name: index for index, name in enumerate(self.previous)}
        order = sorted(
            idle, key=lambda name: (name != self.own, self.blames[name], before.get(name, len(before)), name)
        )
        self.placed = self.previous = order[:size]
        hosts, per_host = tuple(self.placed), self.policy.ranks_per_host
        addresses = tuple(self.hosts[name].address for name in hosts)
        control_ports = tuple(self.hosts[name].control_port for name in hosts)
        port = self.hosts[hosts[0]].port
        for index, name in enumerate(hosts):
            placement = HostPlacement(index * per_host, per_host, hosts, addresses, control_ports, port)
            self.placement = self.placement or placement
            self.hosts[name].attempt, self.hosts[name].ranks = self.attempt, {}
            message = {"kind": "start", "attempt": self.attempt, "restart": self.restart}
            self.outbox.append((name, message | {"placement": placement.to_json()}))
