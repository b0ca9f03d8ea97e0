"""Simulated ranks: they form a process group, train, and save checkpoints through the fence. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.topology.placement import HostPlacement
from meshwright.errors import BusyError, PeerError, StoppedBySignal
from tests.simulated_hosts.store import manifest_of

if TYPE_CHECKING:
    from tests.simulated_hosts.cluster import HostCluster

NOW = float("inf")
"""The time of a failure whose age is zero when it is reported."""
STALL_CHECK_SECONDS = 0.5


class SimulatedRanks:
    """The ranks of one attempt on one host (`RunningRanks`)."""

    def __init__(self, cluster: HostCluster, host: str, token: str, attempt: int, placement: HostPlacement) -> None:
        self.cluster, self.host, self.token, self.attempt, self.placement = cluster, host, token, attempt, placement
        self.ended_at: float | None = None
        self.failure: Failure | None = None
        self.paused = False
        self.on_resume: list[Callable[[], None]] = []
        """What these ranks do as soon as they continue."""
        self.killed = False
        self.ready = False
        """Whether the ranks have reached the rendezvous."""
        self.group = cluster.join_group(self)
        seconds = cluster.scenario.start_seconds
        cluster.loop.after(cluster.loop.random.uniform(0.5, 1.0) * seconds, self._reach_rendezvous)

    @property
    def launcher_pid(self) -> int:
        return 0

    @property
    def runs(self) -> bool:
        return self.ended_at is None

    def _reach_rendezvous(self) -> None:
        if self.paused:
            self.cluster.loop.after(STALL_CHECK_SECONDS, self._reach_rendezvous)
        elif self.runs:
            self.ready = True
            self.group.form()

    def poll(self, seconds: float) -> bool:
        return not self.runs

    def signal(self, number: int) -> None:
        self.group.stop_signal = number

    def kill(self) -> None:
        """Kills the ranks; they end a little later."""
        if self.runs and not self.killed:
            self.killed = True
            failure = Failure(self.placement.first_rank, "Killed", "was killed by signal 9 (SIGKILL)", 8, NOW)
            self.cluster.loop.after(self.cluster.kill_seconds(self.host), self.end, failure)

    def kill_rank(self, rank: int) -> None:
        self.kill()  # the other ranks of this host lose their peer at once

    def read_heartbeats(self) -> dict[int, Any]:
        return dict.fromkeys(self.placement.local_ranks)

    def results(self) -> list[Any]:
        if self.failure is not None:
            raise RanksFailed([self.failure])
        return [{"steps": self.group.step}]

    def fail(self, error: BaseException) -> None:
        if self.runs and not self.killed:
            failure = Failure.from_exception(self.placement.first_rank, error, self.group.step)
            self.end(Failure(**{**vars(failure), "time": NOW}))

    def end(self, failure: Failure | None) -> None:
        if self.runs:
            self.ended_at, self.failure = self.cluster.loop.now, failure
            self.cluster.loop.note(self.host, f"ranks of attempt {self.attempt} end: {failure and failure.error_type}")
            self.cluster.ranks_ended(self)
            if failure is not None:
                self.group.lose(self)

    def vanish(self) -> None:
        """The host has lost its power: its peers notice nothing."""
        if self.runs:
            self.ended_at = self.cluster.loop.now
            self.cluster.ranks_ended(self)
            self.group.broken = True


class RankGroup:
    """The process group of an attempt, and its training."""

    def __init__(self, cluster: HostCluster, placement: HostPlacement, attempt: int) -> None:
        self.cluster, self.loop, self.placement, self.attempt = cluster, cluster.loop, placement, attempt
        self.members: dict[str, SimulatedRanks] = {}
        self.formed = self.broken = self.saving = False
        self.hung = False
        """Whether a rank makes no progress, and will not."""
        self.step = self.saved_step = 0
        self.parent = ""
        self.stop_signal = 0
        self.finishing = False
        """Whether all ranks have done their last step, and end by themselves."""
        self.progress_at = self.loop.now
        """When the group last made progress."""

    def join(self, ranks: SimulatedRanks) -> None:
        self.members[ranks.host] = ranks
        self.loop.after(self.cluster.scenario.rendezvous_timeout, self._expire, ranks)

    def _expire(self, ranks: SimulatedRanks) -> None:
        if not self.formed:
            ranks.fail(PeerError("not all ranks have joined"))

    @property
    def coordinator(self) -> SimulatedRanks:
        """The ranks of the first host: rank 0 publishes checkpoints."""
        return self.members[self.placement.hosts[0]]

    @property
    def stalls(self) -> bool:
        """Whether a collective cannot complete now."""
        members = list(self.members.values())
        return self.hung or any(ranks.paused for ranks in members) or self.cluster.is_split(self.members)

    def form(self) -> None:
        everyone = len(self.members) == len(self.placement.hosts) and all(r.ready for r in self.members.values())
        if everyone and not self.formed and not self.broken:
            if self.stalls:
                self.loop.after(STALL_CHECK_SECONDS, self.form)
                return
            self.formed = True
            self.progress_at = self.loop.now
            self.loop.after(self.cluster.scenario.restore_seconds, self._restore)

    def lose(self, ranks: SimulatedRanks) -> None:
        """The process of a rank has ended: its peers notice, after a while."""
        self.broken = True
        if self.finishing:
            return
        for other in self.members.values():
            if other.runs and self.cluster.network.reaches(ranks.host, other.host):
                delay = self.loop.random.uniform(0.01, self.cluster.scenario.fail_seconds)
                self.loop.after(delay, self._notice, other)

    def _notice(self, ranks: SimulatedRanks) -> None:
        if ranks.paused:
            self.loop.after(STALL_CHECK_SECONDS, self._notice, ranks)
        else:
            ranks.fail(PeerError("Connection closed by peer"))

    def _wait_for(self, condition: bool, call: Any, *args: Any) -> bool:
        """Whether to go on; calls again later otherwise."""
        if not condition:
            self.loop.after(STALL_CHECK_SECONDS, call, *args)
        return condition

    def _restore(self) -> None:
        """Continues from the newest checkpoint that counts."""
        if self.broken or not self._wait_for(not self.stalls and self._reaches_store(), self._restore):
            return
        newest = next(iter(self.cluster.store.list_published()), None)
        if newest is not None:
            self.step = self.saved_step = newest.step
            self.parent = manifest_of(newest).digest
        self.cluster.group_restored(self)
        self.progress_at = self.loop.now
        self._next_steps()

    def _reaches_store(self) -> bool:
        return self.cluster.store.is_available(self.coordinator.host)

    def _next_steps(self) -> None:
        """Trains until the next step at which something happens."""
        scenario = self.cluster.scenario
        every = scenario.checkpoint_every
        target = min(scenario.steps, (self.step // every + 1) * every)
        self._train(max(0, target - self.step))

    def _train(self, steps: int) -> None:
        part = min(steps, max(1, int(2.0 / self.cluster.scenario.step_seconds)))
        self.loop.after(part * self.cluster.scenario.step_seconds, self._trained, part, steps - part)

    def _trained(self, part: int, rest: int) -> None:
        if self.broken or not self._wait_for(not self.stalls, self._trained, part, rest):
            return
        self.step += part
        self.progress_at = self.loop.now
        if rest and not self.stop_signal:
            self._train(rest)
        else:
            self._save()

    def _save(self) -> None:
        """Stages a checkpoint; training continues while it is written. One save is in flight at a time."""
        if self.broken or not self._wait_for(not self.saving and not self.stalls, self._save):
            return
        self.progress_at = self.loop.now
        last = self.step >= self.cluster.scenario.steps or bool(self.stop_signal)
        if self.step == self.saved_step:
            self._finish()
            return
        self.saving = True
        self.loop.after(self.cluster.scenario.write_seconds, self._written, self.step, last)
        if not last:
            self._next_steps()

    def _written(self, step: int, last: bool) -> None:
        """Every rank has written its shard: rank 0 checks the fence."""
        if self.broken or not self._wait_for(not self.stalls and self._reaches_store(), self._written, step, last):
            return
        self._check_fence(step, last)

    def _check_fence(self, step: int, last: bool) -> None:
        """As the saver does before it publishes (`CheckpointSaver._publish`)."""
        rank0 = self.coordinator
        if not rank0.runs or not self._coordinator_can_write(lambda: self._check_fence(step, last)):
            return
        if (newest := self.cluster.store.fence().attempt) > self.attempt:
            rank0.fail(BusyError(f"attempt {newest} has taken over the run"))
            return
        delay = self.loop.random.uniform(0.0, self.cluster.scenario.publish_seconds)
        self.loop.after(delay, self._publish, step, last)
        self.cluster.fence_passed(self)

    def _coordinator_can_write(self, again: Callable[[], None]) -> bool:
        """Whether rank 0 can use the store now; otherwise it does `again` when it can."""
        if self.coordinator.paused:
            self.coordinator.on_resume.append(again)
            return False
        return self._wait_for(self._reaches_store(), again)

    def _publish(self, step: int, last: bool) -> None:
        """A rank that was paused in between publishes late: the lease of a later attempt does not inherit that."""
        if not self.coordinator.runs or not self._coordinator_can_write(lambda: self._publish(step, last)):
            return
        digest = self.cluster.store.publish_checkpoint(self.attempt, step, self.parent, self.saved_step)
        self.saving = False
        if digest is not None:
            self.parent, self.saved_step = digest, step
            self.progress_at = self.loop.now
        if last and not self.broken:
            self._finish()

    def _finish(self) -> None:
        self.finishing = True
        for ranks in self.members.values():
            delay = self.loop.random.uniform(0.0, 0.5)
            self.loop.after(delay, self._finish_host, ranks)

    def _finish_host(self, ranks: SimulatedRanks) -> None:
        if not self._wait_for(not ranks.paused, self._finish_host, ranks):
            return
        if self.stop_signal and self.step < self.cluster.scenario.steps:
            ranks.fail(StoppedBySignal(self.stop_signal, self.step))
        elif not ranks.killed:
            ranks.end(None)
