"""What must hold in every schedule, whatever fails: checked while the schedule runs, and at its end. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulated_hosts.store import manifest_of

if TYPE_CHECKING:
    from meshwright.base.checkpoint.listing import CheckpointEntry
    from tests.simulated_hosts.cluster import HostCluster
    from tests.simulated_hosts.leading import LeadingSupervisor
    from tests.simulated_hosts.training import RankGroup, SimulatedRanks

ONE_WRITER = "one writer"
EXACTLY_ONCE = "every sample exactly once"
INHERITED = "published checkpoints are inherited"
ONE_ATTEMPT = "one attempt per process group and host"
DETECTION = "a lost host is detected in time"
FENCED_RANKS = "ranks of a silent host end before others replace them"
LIVENESS = "the job ends after the last fault"
EXIT_CODE = "the same exit code on every host"
ONE_LEASE = "one lease per attempt"
BOUNDED = "bounded attempts and messages"
NO_ERROR = "no unexpected error"

DETECTION_SLACK = 2.5
"""Seconds beyond `host_timeout` in which a lost host is found: the last beat may be a second old, messages take time,
and clocks differ by 1 %.
"""
SETTLE_SECONDS = 240.0
"""Seconds after the last fault within which a job ends, beyond the time of its training."""


@dataclass(frozen=True)
class Violation:
    """A finding: which invariant, when, and how."""

    invariant: str
    time: float
    message: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message} (at {self.time:.3f} s)"


class Invariants:
    """Watches one cluster."""

    def __init__(self, cluster: HostCluster) -> None:
        self.cluster = cluster
        self.violations: list[Violation] = []
        self.watched: set[tuple[str, str, int]] = set()
        self.faults = 0
        self.counted: list[CheckpointEntry] = []
        cluster.store.on_change.append(self.check_store)

    def violation(self, invariant: str, message: str) -> None:
        self.violations.append(Violation(invariant, self.cluster.loop.now, message))
        self.cluster.loop.note("VIOLATION", f"{invariant}: {message}")

    def expect(self, condition: bool, invariant: str, message: str) -> None:
        if not condition:
            self.violation(invariant, message)

    # The store.

    def check_store(self) -> None:
        """The checkpoints that count form one chain, and none is of an attempt that had been replaced."""
        store = self.cluster.store
        attempts = [lease.attempt for lease in store.leases]
        self.expect(attempts == list(range(1, len(attempts) + 1)), ONE_LEASE, f"attempts {attempts}")
        parent, step = "", 0
        counted = store.list_published()
        names = {entry.name for entry in counted}
        lost = [e.name for e in self.counted if e.name not in names and manifest_of(e).time < store.leases[-1].listed]
        self.expect(not lost, INHERITED, f"attempt {attempts[-1:]} does not inherit {', '.join(lost)}")
        self.counted = counted
        for entry in reversed(counted):
            manifest = manifest_of(entry)
            chained = manifest.parent == parent and manifest.first_step == step and manifest.step > step
            self.expect(
                chained, ONE_WRITER, f"{entry.name} follows {manifest.parent or 'none'}, not {parent or 'none'}"
            )
            parent, step = manifest.digest, manifest.step
            late = [lease.attempt for lease in store.leases[entry.attempt :] if lease.time < manifest.time]
            self.expect(not late, ONE_WRITER, f"{entry.name} counts, but attempt {late[:1]} had the lease before")

    def restored(self, group: RankGroup) -> None:
        """Ranks continue from the newest checkpoint that counts."""
        newest = next(iter(self.cluster.store.list_published()), None)
        expected = newest.step if newest is not None else 0
        self.expect(group.step == expected, ONE_WRITER, f"attempt {group.attempt} restores step {group.step}")

    # Ranks.

    def ranks_start(self, ranks: SimulatedRanks) -> None:
        host = self.cluster.hosts[ranks.host]
        running = host.ranks is not None and host.ranks.runs
        others = f"{ranks.host} starts ranks of attempt {ranks.attempt} beside those of another attempt"
        self.expect(not running, ONE_ATTEMPT, others)

    def ranks_join(self, ranks: SimulatedRanks, group: RankGroup) -> None:
        same = group.attempt == ranks.attempt and ranks.placement.hosts == group.placement.hosts
        self.expect(same, ONE_ATTEMPT, f"ranks of attempt {ranks.attempt} join those of attempt {group.attempt}")

    # Hosts.

    def supervisor_lost(self, supervisor: LeadingSupervisor) -> None:
        """A supervisor has died: its leader must notice."""
        leader, loop = self.cluster.leader, self.cluster.loop
        if leader is None or leader.leading is None or leader is supervisor:
            return
        known = leader.leading.leader.hosts.get(supervisor.host)
        if known is not None and known.token == supervisor.token:
            bound = self.cluster.scenario.host_timeout * 1.011 + DETECTION_SLACK
            loop.after(bound, self._check_detected, leader, supervisor, loop.now)

    def _check_detected(self, leader: LeadingSupervisor, lost: LeadingSupervisor, since: float) -> None:
        still_leads = leader.process.alive and leader.leading is not None and self.cluster.leader is leader
        host = self.cluster.hosts[leader.host]
        if not still_leads or leader.leading is None or max(host.disturbed_until, host.without_store_until) > since:
            return
        known = leader.leading.leader.hosts.get(lost.host)
        found = known is None or known.token != lost.token
        self.expect(found, DETECTION, f"{leader.token} still counts {lost.token}, lost at {since:.3f} s")

    def check_leader(self, supervisor: LeadingSupervisor) -> None:
        """Of hosts that the leader has just lost by their silence, no rank runs any more."""
        assert supervisor.leading is not None
        leader = supervisor.leading.leader
        for name, ended in leader.ended.items():
            key = (supervisor.token, name, leader.attempt)
            if ended.lost.startswith("no heartbeat") and key not in self.watched:
                self.watched.add(key)
                host = self.cluster.hosts[name]
                excused = host.disturbed_until > self.cluster.loop.now - 2 * self.cluster.scenario.host_timeout
                ranks = host.ranks
                running = ranks is not None and ranks.runs and ranks.attempt == leader.attempt
                self.expect(excused or not running, FENCED_RANKS, f"{name} still runs attempt {leader.attempt}")
        members = (s.member for s in self.cluster.supervisors[-64:])
        sent = max((len(member.sent) for member in members if member is not None), default=0)
        self.expect(sent <= leader.policy.host_timeout + 5, BOUNDED, f"{sent} beats are not acknowledged")

    # The end.

    def check_end(self, expected: set[int], deadline: float) -> None:
        """The job has ended everywhere, in the same way, and every sample was trained once."""
        cluster = self.cluster
        self.expect(cluster.loop.events < cluster.loop.max_events, BOUNDED, f"{cluster.loop.events} events")
        if not cluster.has_ended:
            alive = [s.token for s in cluster.supervisors if s.process.alive]
            self.violation(LIVENESS, f"{', '.join(alive)} still run at {deadline:.0f} s")
            return
        codes = {s.token: s.exit_code for s in cluster.supervisors if s.exit_code is not None and not s.left_alone}
        found = set(codes.values())
        # Too few hosts end one leader; hosts that it could not tell may still complete the job.
        self.expect(len(found) <= 1 or found == {0, 8} & expected, EXIT_CODE, f"{codes}")
        self.expect(found <= expected, LIVENESS, f"exit codes {sorted(found)}, expected one of {sorted(expected)}")
        if found == {0}:
            self._check_samples()
        leases = len(cluster.store.leases)
        bound = 4 + 4 * self.faults + 2 * len(cluster.hosts)
        self.expect(leases <= bound, BOUNDED, f"{leases} attempts after {self.faults} faults")
        messages = 20 + 6 * len(cluster.hosts) * (cluster.loop.now + 10)
        sent = cluster.network.messages
        self.expect(sent <= messages, BOUNDED, f"{sent} messages in {cluster.loop.now:.0f} s")

    def _check_samples(self) -> None:
        """Samples are a pure function of the step: a step that two counted checkpoints contain was trained twice."""
        trained: list[int] = []
        for entry in reversed(self.cluster.store.list_published()):
            manifest = manifest_of(entry)
            trained += range(manifest.first_step, manifest.step)
        steps = list(range(self.cluster.scenario.steps))
        self.expect(trained == steps, EXACTLY_ONCE, f"steps {trained[:8]}... instead of 0 to {len(steps) - 1}")
