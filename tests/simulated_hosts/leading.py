"""A simulated supervisor that leads the job: the loop of `run_attempts` around the real `HostRanks`. Torch-free."""

from __future__ import annotations

import queue
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.records.failures import AttemptResized, RanksFailed
from meshwright.base.records.incidents import Incident, assign_verdict
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.election import Election
from meshwright.core.recover.hosts.host_ranks import POLL_SECONDS, HostRanks, HostsMissing, Inbox
from meshwright.core.recover.hosts.leader import HostsPolicy
from meshwright.core.recover.hosts.local_ranks import LocalRanks
from meshwright.core.recover.hosts.member import Member
from meshwright.core.recover.hosts.supervise_hosts import SteppedBack
from meshwright.core.recover.supervisor import CHECK_INTERVAL, SECONDS_AFTER_HANG, GracePeriodExpired, raise_if_final
from meshwright.errors import BusyError, MeshwrightError, StoppedBeforeStart
from tests.simulated_hosts.events import FOREVER, HostClock, Process, ProcessKilled, Wait
from tests.simulated_hosts.store import StoredLease
from tests.simulated_hosts.training import SimulatedRanks

if TYPE_CHECKING:
    from tests.simulated_hosts.cluster import HostCluster

Steps = Generator[Wait, None, Any]
EPSILON = 1e-3
"""Comparisons with deadlines are strict: a process wakes a little later."""
JOB = "job"


class SimulatedHostRanks(HostRanks):
    """The real `HostRanks`; only the look at the store is virtual."""

    supervisor: LeadingSupervisor

    def _has_checkpoint(self) -> bool:
        if not self.supervisor.can_use_store:
            return False
        newest = next(iter(self.supervisor.cluster.store.list_published()), None)
        return newest is not None and newest.attempt == self.leader.attempt


class LeadingSupervisor:
    """A supervisor process of a host, as far as it leads."""

    def __init__(self, cluster: HostCluster, host: str, number: int, clock: HostClock) -> None:
        self.cluster, self.loop, self.host, self.clock = cluster, cluster.loop, host, clock
        self.token, self.port = f"{host}-{number}", number
        self.scenario = cluster.scenario
        self.received: list[int] = []
        self.inbox: Inbox = queue.SimpleQueue()
        self.local = LocalRanks(RunFolder(Path("/nowhere")), self, self.scenario.hang_timeout, clock)
        self.leading: SimulatedHostRanks | None = None
        self.member: Member | None = None
        self.stepped_back = False
        self.beating = 0
        """The attempt whose beat counter this process advances, or 0."""
        self.election = Election(JOB, self.token, self.scenario.observation)
        self.exit_code: int | None = None
        self.left_alone = False
        """Whether a signal ended this supervisor while it had no leader that it could tell."""
        self.process = Process(self.loop, clock, self._main(), self._crashed)
        self.process.collects = self.scenario.poll_seconds

    # What the protocol classes call.

    def start(self, attempt: int, restart: int, placement: HostPlacement | None = None) -> SimulatedRanks:
        """Starts the ranks of this host (`LocalLauncher`)."""
        assert placement is not None
        return SimulatedRanks(self.cluster, self.host, self.token, attempt, placement)

    def free_port(self) -> int:
        return self.loop.random.randint(20000, 60000)

    # Waiting.

    @property
    def can_use_store(self) -> bool:
        return self.cluster.store.is_available(self.host)

    def sleep(self, seconds: float) -> Steps:
        yield self.clock() + seconds, False

    def use_store(self) -> Steps:
        """One operation of the store: it takes a while, and blocks while the store does not answer."""
        yield from self.sleep(self.loop.random.uniform(0.2, 1.0) * self.scenario.store_seconds)
        while not self.can_use_store:
            yield from self.sleep(0.25)
        self.instant()

    def instant(self) -> None:
        """An instant of the protocol at which a fault may kill this process."""
        self.cluster.instant(self)
        if not self.process.alive:
            raise ProcessKilled

    def _crashed(self, error: BaseException) -> None:
        self.cluster.violation("no unexpected error", f"{self.token}: {type(error).__name__}: {error}")

    def _main(self) -> Steps:
        """What the process does from its start to its end."""
        raise NotImplementedError

    def _publish_lease(self, attempt: int, restart: int) -> Steps:
        """`publish_if_free`."""
        inherited, listed = self.cluster.inherited(), self.loop.now
        yield from self.use_store()
        address = f"{self.host}:{self.port}"
        lease = StoredLease(attempt, restart, self.token, self.host, JOB, address, inherited, self.loop.now, listed)
        published = self.cluster.store.publish_lease(lease)
        self.instant()
        return lease if published else None

    def _new_member(self, is_leader: bool) -> Member:
        timeout = self.scenario.host_timeout
        return Member(self.host, self.token, self.host, self.port, timeout, self.free_port, is_leader)

    def _kill_deadline(self) -> float:
        deadline = self.local.kill_deadline + EPSILON
        return deadline if self.local.running is not None and deadline > self.clock() else FOREVER

    def _end_local(self) -> Steps:
        """`LocalRanks.end`."""
        if (running := self.local.running) is not None:
            running.kill()
            while not running.poll(0):
                yield self.clock() + 1.0, True
            self.local.running = self.local.readings = None

    # `HostSupervisor._lead`.

    def _lead(self, lease: StoredLease) -> Steps:
        self.inbox = queue.SimpleQueue()
        member = self._new_member(is_leader=True)
        self.leading = ranks = SimulatedHostRanks(self.policy, member, self.local, self.inbox, self.received)
        ranks.supervisor = self
        error: MeshwrightError | None = None
        try:
            yield from self._run_attempts(ranks, lease)
        except HostsMissing as missing:
            error = missing
            if not self.stepped_back or ranks.leader.previous:
                self.stepped_back, error = True, SteppedBack(missing.message)
                self.election.step_back(self.clock())
        except MeshwrightError as raised:
            error = raised
        self.leading, self.beating = None, 0
        if not isinstance(error, BusyError | SteppedBack):
            ranks.leave(error, {})
        for connection in ranks.connections.values():
            connection.close()
        if error is not None:
            raise error

    @property
    def policy(self) -> HostsPolicy:
        return self.cluster.policy

    def _run_attempts(self, ranks: SimulatedHostRanks, lease: StoredLease) -> Steps:
        """`supervisor.run_attempts`."""
        store, restart, fruitless = self.cluster.store, lease.restart, 0
        history: list[Incident] = []
        while True:
            yield from self._record_lost_attempts(lease.attempt)
            try:
                yield from self._attempt(ranks, lease, restart)
                yield from self._raise_if_lost(lease)
                store.write_incident(Incident(lease.attempt, "complete"))
                self.instant()
                return
            except RanksFailed as failed:
                yield from self._raise_if_lost(lease)
                incident = self._incident(lease, failed, history)
                history.append(incident)
                if self.received:
                    failed.exit_code = 128 + self.received[0]
                    store.write_incident(replace(incident, signal=self.received[0]))
                    raise
                progress = any(entry.attempt == lease.attempt for entry in store.list_published())
                fruitless = 0 if progress else fruitless
                raise_if_final(failed, incident, fruitless, self.scenario.restarts)
                restart, fruitless = restart + 1, fruitless + 1
            except AttemptResized as resized:
                yield from self._raise_if_lost(lease)
                store.write_incident(Incident(lease.attempt, "resized", message=resized.message))
                restart += 1
            except MeshwrightError as error:
                yield from self._raise_if_lost(lease)
                outcome = "stopped" if isinstance(error, (StoppedBeforeStart, GracePeriodExpired)) else "failed"
                store.write_incident(Incident(lease.attempt, outcome, message=str(error), exit_code=error.exit_code))
                self.instant()
                raise
            self.instant()
            yield from self._raise_if_lost(lease)
            taken = yield from self._publish_lease(lease.attempt + 1, restart)
            if taken is None:
                raise BusyError("another host has taken over the run")
            lease = taken

    def _incident(self, lease: StoredLease, failed: RanksFailed, history: list[Incident]) -> Incident:
        cause, group = failed.first, self.cluster.group_of(lease.attempt)
        formed = group is not None and group.formed
        step = group.step if group is not None and formed else None
        phase = "forward" if formed else "start"
        incident = Incident(
            lease.attempt, "failed", cause.rank, step, phase, cause.exit_code, cause.error_type, cause.message,
            host=cause.host,
        )  # fmt: skip
        stopped = cause.error_type == "StoppedBySignal"
        incident = replace(incident, outcome="stopped") if stopped else assign_verdict(incident, history)
        self.cluster.store.write_incident(incident)
        return incident

    def _record_lost_attempts(self, current: int) -> Steps:
        yield from self.use_store()
        store = self.cluster.store
        for lease in store.leases:
            if lease.attempt < current and lease.attempt not in store.incidents:
                store.write_incident(Incident(lease.attempt, "lost"))

    def _raise_if_lost(self, lease: StoredLease) -> Steps:
        yield from self.use_store()
        self._raise_if_taken(lease)

    def _raise_if_taken(self, lease: StoredLease) -> None:
        if self.cluster.store.fence().attempt > lease.attempt:
            raise BusyError("another host has taken over the run")

    def _attempt(self, ranks: SimulatedHostRanks, lease: StoredLease, restart: int) -> Steps:
        """`Attempt.run`."""
        if self.received:
            raise StoppedBeforeStart(self.received[0])
        ranks.start(lease.attempt, restart)
        self.beating = lease.attempt
        self._beat(lease.attempt)
        try:
            yield from self._wait(ranks, lease)
        except MeshwrightError:
            yield from self._kill_all(ranks)
            self.beating = 0
            raise
        self.beating = 0
        ranks.results()

    def _beat(self, attempt: int) -> None:
        """`Lease.keep_alive`: a thread of this process."""
        if self.process.alive and self.beating == attempt:
            if not self.process.paused and self.can_use_store:
                self.cluster.store.beats[attempt] = self.cluster.store.beats.get(attempt, -1) + 1
            self.loop.after(1.0 / self.clock.rate, self._beat, attempt)

    def _kill_all(self, ranks: SimulatedHostRanks) -> Steps:
        """`HostRanks.kill`."""
        ranks.leader.kill(self.clock())
        deadline = self.clock() + self.scenario.host_timeout
        while not ranks.poll(0) and self.clock() < deadline:
            yield min(deadline, ranks.member.next_beat, self._kill_deadline()), True
        yield from self._end_local()

    def _wait(self, ranks: SimulatedHostRanks, lease: StoredLease) -> Steps:
        """`Attempt.wait` and `check_ranks`."""
        leader, store = ranks.leader, self.cluster.store
        next_check, forwarded, grace, hang_deadline, hung = 0.0, False, FOREVER, FOREVER, False
        while not ranks.poll(0):
            now = self.clock()
            if now >= next_check:
                while not self.can_use_store:  # the check of the lease waits for the store
                    yield from self.sleep(0.25)
                self._raise_if_taken(lease)
                now = self.clock()
                next_check = now + CHECK_INTERVAL
            group = self.cluster.group_of(lease.attempt)
            hang_at = FOREVER
            if group is not None and group.formed and not hung:
                hang_at = self.clock.offset + self.clock.rate * group.progress_at + self.scenario.hang_timeout
                if now > hang_at:
                    hung, hang_deadline, hang_at = True, now + SECONDS_AFTER_HANG, FOREVER
                    ranks.kill_rank(0)
            if self.received and not forwarded:
                forwarded, grace = True, now + self.scenario.grace_period
                ranks.signal(self.received[0])
            if now > hang_deadline:
                leader.kill(now)
            if now > grace:
                raise GracePeriodExpired(self.received[0], self.scenario.grace_period, 0)
            taken = store.newest is not None and store.newest.attempt > lease.attempt
            check = next_check if taken or not self.can_use_store else FOREVER
            self.cluster.check_leader(self)
            hang_wake = hang_deadline + EPSILON if leader.kill_at > hang_deadline else FOREVER
            yield min(self._leader_deadline(ranks), check, hang_at + EPSILON, grace + EPSILON, hang_wake), True

    def _leader_deadline(self, ranks: SimulatedHostRanks) -> float:
        """When the leader acts next if no message arrives."""
        if ranks.member.actions:
            return self.clock() + POLL_SECONDS
        leader, policy = ranks.leader, self.policy
        heard = min((host.heard for host in leader.hosts.values() if host.name != leader.own), default=FOREVER)
        times = [ranks.member.next_beat, heard + policy.host_timeout + EPSILON, self._kill_deadline()]
        if not leader.placed:
            first = leader.began + min(policy.host_timeout, policy.form_timeout)
            waits = (first, leader.began + policy.form_timeout)
            times += [at + EPSILON for at in waits if at > self.clock() - EPSILON]
        elif leader.killed_at is not None:
            times.append(leader.killed_at + policy.host_timeout + EPSILON)
        else:
            times.append(leader.kill_at)
        return max(min(times), self.clock() + EPSILON)
