"""The simulated hosts of a job, and what can happen to them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshwright.core.recover.hosts.leader import HostsPolicy
from tests.simulated_hosts.events import EventLoop, HostClock, Process
from tests.simulated_hosts.invariants import Invariants
from tests.simulated_hosts.leading import LeadingSupervisor
from tests.simulated_hosts.network import Network
from tests.simulated_hosts.network import Path as NetworkPath
from tests.simulated_hosts.scenario import Scenario
from tests.simulated_hosts.store import SharedStore
from tests.simulated_hosts.supervisor import SimulatedSupervisor
from tests.simulated_hosts.training import RankGroup, SimulatedRanks


@dataclass
class SimulatedHost:
    """A host, whichever supervisor runs on it."""

    name: str
    clock: HostClock
    off: bool = False
    supervisor: SimulatedSupervisor | None = None
    ranks: SimulatedRanks | None = None
    """The ranks that run, or ran last."""
    slow_kill: float = 0.0
    """Additional seconds that killed processes take to end."""
    without_store_until: float = 0.0
    """Until when a leader on this host waits for the store, and does not look at the other hosts."""
    disturbed_until: float = 0.0
    """Until when a pause or a slow kill excuses ranks of this host that end late."""


class HostCluster:
    """Hosts, network, store and ranks of one schedule."""

    def __init__(self, scenario: Scenario, loop: EventLoop) -> None:
        self.scenario, self.loop = scenario, loop
        self.network = Network(loop, self._latency)
        self.network.before_send = self._before_send
        self.store = SharedStore(loop)
        self.policy = HostsPolicy(
            scenario.hosts,
            scenario.min_hosts,
            scenario.ranks_per_host,
            scenario.host_timeout,
            scenario.form_timeout,
            scenario.grow,
            lambda _hosts: "",
        )
        self.hosts: dict[str, SimulatedHost] = {}
        self.groups: dict[tuple[str, int], RankGroup] = {}
        self.group_by_attempt: dict[int, RankGroup] = {}
        self.supervisors: list[SimulatedSupervisor] = []
        self.started_at: dict[int, float] = {}
        """When the last ranks of each attempt started."""
        self.restored_at: dict[int, float] = {}
        """When each attempt had restored its checkpoint."""
        self.instants = 0
        self.kill_at_instants: set[int] = set()
        """The instants of the leaders' protocol at which the leader is killed."""
        self.pause_before_publication = 0.0
        """For how many seconds the host of rank 0 stops before it publishes the next checkpoint."""
        self.invariants = Invariants(self)
        for name in scenario.names:
            rate = 1.0 + loop.random.uniform(-scenario.clock_rate, scenario.clock_rate)
            self.hosts[name] = SimulatedHost(name, HostClock(loop, loop.random.uniform(0.0, 1e5), rate))

    def _latency(self, _path: NetworkPath) -> float:
        return self.scenario.latency + self.scenario.jitter * self.loop.random.random()

    # Supervisors.

    def start_supervisor(self, name: str) -> None:
        """Starts a supervisor, unless one runs or has ended by itself."""
        host = self.hosts[name]
        known = host.supervisor
        if host.off or (known is not None and (known.process.alive or known.exit_code is not None)):
            return
        number = len(self.supervisors) + 1
        host.supervisor = SimulatedSupervisor(self, name, number, host.clock)
        self.supervisors.append(host.supervisor)
        self.loop.note(name, f"supervisor {number} starts")

    def kill_supervisor(self, name: str) -> None:
        """Kills a supervisor; the system kills its ranks with it, and closes its connections."""
        host = self.hosts[name]
        if (supervisor := host.supervisor) is None or not supervisor.process.alive:
            return
        self.loop.note(name, "supervisor is killed")
        supervisor.process.kill()
        self.invariants.supervisor_lost(supervisor)
        if host.ranks is not None:
            host.slow_kill = 0.0
            host.ranks.kill()
        for end in self.network.ends:
            if end.process is supervisor.process:
                end.close()

    def power_off(self, name: str) -> None:
        """Everything on a host ends at once, and nobody is told."""
        host = self.hosts[name]
        if host.off:
            return
        self.loop.note(name, "loses power")
        host.off = True
        if host.supervisor is not None and host.supervisor.process.alive:
            host.supervisor.process.kill()
            self.invariants.supervisor_lost(host.supervisor)
        if host.ranks is not None:
            host.ranks.vanish()
        for end in self.network.ends:
            if end.path[0] == name:
                end.broken = True
                end.open = False
                end.held = []

    def power_on(self, name: str) -> None:
        """The host runs again, and refuses the connections that it had before."""
        self.hosts[name].off = False
        for end in self.network.ends:
            if end.path[0] == name and end.broken and end.peer.open and not end.process.alive:
                self.loop.after(self.network.delay(end.path), end.peer.see_end)

    def pause(self, name: str, supervisor: bool, ranks: bool) -> Callable[[], None]:
        """Stops processes of a host (SIGSTOP); returns what continues them."""
        host = self.hosts[name]
        stopped_supervisor = host.supervisor if supervisor else None
        stopped_ranks = host.ranks if ranks else None
        if stopped_supervisor is not None:
            stopped_supervisor.process.pause()
        if stopped_ranks is not None:
            stopped_ranks.paused = True

        def resume() -> None:
            host.disturbed_until = self.loop.now + 1.0
            if stopped_ranks is not None:
                stopped_ranks.paused = False
                for call in stopped_ranks.on_resume:
                    self.loop.after(self.loop.random.uniform(0.0, 0.3), call)
                stopped_ranks.on_resume.clear()
            if stopped_supervisor is not None:
                stopped_supervisor.process.continue_()

        host.disturbed_until = float("inf")
        return resume

    def supervisor_ended(self, supervisor: LeadingSupervisor) -> None:
        self.loop.note(supervisor.host, f"supervisor ends with exit code {supervisor.exit_code}")
        for end in self.network.ends:
            if end.process is supervisor.process:
                end.close()

    def listener(self, name: str, port: int) -> SimulatedSupervisor | None:
        """The supervisor that listens at an address."""
        supervisor = self.hosts[name].supervisor if name in self.hosts else None
        listens = supervisor is not None and supervisor.port == port and supervisor.process.alive
        return supervisor if listens else None

    def is_off(self, name: str) -> bool:
        return self.hosts[name].off

    @property
    def leader(self) -> SimulatedSupervisor | None:
        """The supervisor that holds the newest lease, if it lives."""
        newest = self.store.newest
        found = (s for s in self.supervisors if newest is not None and s.token == newest.token and s.process.alive)
        return next(found, None)

    def _before_send(self, process: Process) -> None:
        leader = self.leader if self.kill_at_instants else None
        if leader is not None and leader.process is process:
            self.instant(leader)

    def instant(self, supervisor: LeadingSupervisor) -> None:
        """Kills a leader at an instant that the schedule has drawn."""
        if not self.kill_at_instants or self.leader is not supervisor:
            return
        self.instants += 1
        if self.instants in self.kill_at_instants:
            self.kill_at_instants.discard(self.instants)
            self.kill_supervisor(supervisor.host)

    # Ranks.

    def join_group(self, ranks: SimulatedRanks) -> RankGroup:
        """The process group at the address that a placement names."""
        self.invariants.ranks_start(ranks)
        placement = ranks.placement
        key = (placement.addresses[0], placement.port)
        if key not in self.groups:
            self.groups[key] = self.group_by_attempt[ranks.attempt] = RankGroup(self, placement, ranks.attempt)
        group = self.groups[key]
        self.invariants.ranks_join(ranks, group)
        group.join(ranks)
        self.hosts[ranks.host].ranks = ranks
        self.started_at[ranks.attempt] = self.loop.now
        self.loop.note(ranks.host, f"starts ranks of attempt {ranks.attempt} on {', '.join(placement.hosts)}")
        return group

    def ranks_ended(self, ranks: SimulatedRanks) -> None:
        supervisor = self.hosts[ranks.host].supervisor
        if supervisor is not None:
            supervisor.process.poke()

    def group_restored(self, group: RankGroup) -> None:
        self.loop.note(f"attempt {group.attempt}", f"restores step {group.step}")
        self.restored_at[group.attempt] = self.loop.now
        self.invariants.restored(group)

    def fence_passed(self, group: RankGroup) -> None:
        """Rank 0 has found that its attempt holds the lease: a fault may stop its host before it publishes."""
        if self.pause_before_publication:
            seconds, self.pause_before_publication = self.pause_before_publication, 0.0
            self.loop.note(group.coordinator.host, f"stops for {seconds:.1f} s before it publishes")
            self.loop.after(seconds, self.pause(group.coordinator.host, True, True))

    def group_of(self, attempt: int) -> RankGroup | None:
        return self.group_by_attempt.get(attempt)

    def kill_seconds(self, name: str) -> float:
        return self.scenario.kill_seconds * self.loop.random.uniform(0.2, 1.0) + self.hosts[name].slow_kill

    def is_split(self, names: Iterable[str]) -> bool:
        """Whether a path between two of these hosts is cut."""
        members = set(names)
        return any(sender in members and receiver in members for sender, receiver in self.network.cut)

    def inherited(self) -> dict[str, str]:
        return self.store.inherited()

    # Findings.

    def check_leader(self, supervisor: LeadingSupervisor) -> None:
        self.invariants.check_leader(supervisor)

    def violation(self, invariant: str, message: str) -> None:
        self.invariants.violation(invariant, message)

    @property
    def has_ended(self) -> bool:
        """Whether no supervisor runs any more."""
        started = bool(self.supervisors)
        return started and not any(supervisor.process.alive for supervisor in self.supervisors[::-1])
