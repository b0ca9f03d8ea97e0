"""Runs one schedule of faults, everything drawn from its seed, and checks the invariants. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.simulated_hosts.cluster import HostCluster
from tests.simulated_hosts.events import EventLoop
from tests.simulated_hosts.faults import FAULTS, draw_seconds
from tests.simulated_hosts.invariants import SETTLE_SECONDS, Violation
from tests.simulated_hosts.scenario import Scenario, draw_scenario

MAX_FAULTS = 5
STOP_SHARE = 0.1
"""The share of schedules in which a supervisor receives SIGTERM."""
LOSS_SHARE = 0.15
"""The share of schedules in which hosts are lost for good."""
SIGTERM = 15
TOO_FEW_HOSTS = 8


@dataclass
class ScheduleResult:
    """What happened in a schedule. The same seed always gives the same result."""

    seed: int
    scenario: Scenario
    faults: list[str]
    violations: list[Violation]
    exit_codes: set[int]
    attempts: int
    seconds: float
    """Virtual time."""
    events: int
    messages: int
    trace: list[str] = field(default_factory=list)


class Schedule:
    """One schedule while it runs."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed, self.random = seed, Random(seed)
        self.scenario = draw_scenario(self.random)
        self.loop = EventLoop(self.random.getrandbits(64))
        self.loop.trace = [] if trace else None
        self.cluster = HostCluster(self.scenario, self.loop)
        self.faults: list[str] = []
        self.pending = 0
        """Faults that have not struck or healed yet."""
        self.healed_at = 0.0
        self.stopped = False
        self.lost_for_good: list[str] = []

    def run(self) -> ScheduleResult:
        scenario, random = self.scenario, self.random
        for name in scenario.names:
            self.loop.after(random.uniform(0.0, 3.0), self.cluster.start_supervisor, name)
        training = scenario.steps * scenario.step_seconds
        self._draw_faults(training)
        last = 10.0 + 1.5 * training + 4 * scenario.host_timeout
        self.cluster.invariants.faults = len(self.faults)
        self.loop.run(last, self._is_over)
        deadline = max(last, self.healed_at) + SETTLE_SECONDS + 3 * training
        self.loop.run(deadline, self._is_over)
        self.cluster.invariants.check_end(self._expected_codes(), deadline)
        return self._result()

    def _draw_faults(self, training: float) -> None:
        random = self.random
        end = 5.0 + 1.2 * training
        for _ in range(random.randint(0, MAX_FAULTS)):
            self._add(random.choice(sorted(FAULTS)), random.uniform(0.0, end))
        if random.random() < 0.3:  # faults at the same time
            time = random.uniform(0.0, end)
            for _ in range(2):
                self._add(random.choice(sorted(FAULTS)), time + random.uniform(0.0, 0.5))
        if random.random() < STOP_SHARE:
            self._plan("SIGTERM", random.uniform(0.0, end), self._stop)
        if random.random() < LOSS_SHARE:
            for _ in range(random.randint(1, 2)):
                self._plan("lose a host for good", random.uniform(0.0, end), self._lose_for_good)

    def _plan(self, name: str, time: float, strike: object) -> None:
        self.faults.append(f"{name} at {time:.2f}")
        self.pending += 1
        self.loop.at(time, strike)  # type: ignore[arg-type]

    def _add(self, name: str, time: float) -> None:
        self._plan(name, time, lambda: self._strike(name))

    def _strike(self, name: str) -> None:
        seconds = draw_seconds(self.cluster, self.random)
        self.loop.note("FAULT", f"{name} for {seconds:.2f} s")
        heal = FAULTS[name](self.cluster, self.random)

        def healed() -> None:
            self.loop.note("FAULT", f"{name} is over")
            heal()
            for lost in self.lost_for_good:
                self.cluster.power_off(lost)
            self._over()

        self.loop.after(seconds, healed)

    def _over(self) -> None:
        self.pending -= 1
        self.healed_at = self.loop.now
        if not self.pending:  # what runs the supervisors starts those again that a fault at an instant has killed
            for name in self.cluster.hosts:
                if self.cluster.hosts[name].supervisor is not None:
                    self.cluster.start_supervisor(name)

    def _stop(self) -> None:
        alive = [s for s in self.cluster.supervisors if s.process.alive]
        if alive:
            supervisor = self.random.choice(alive)
            self.loop.note("FAULT", f"SIGTERM to {supervisor.token}")
            supervisor.received.append(SIGTERM)
            supervisor.process.poke()
            self.stopped = True
        self._over()

    def _lose_for_good(self) -> None:
        name = self.random.choice(sorted(self.cluster.hosts))
        self.loop.note("FAULT", f"{name} is lost for good")
        self.lost_for_good.append(name)
        self.cluster.power_off(name)
        self._over()

    def _is_over(self) -> bool:
        return not self.pending and self.cluster.has_ended

    def _expected_codes(self) -> set[int]:
        codes = {0, 128 + SIGTERM} if self.stopped else {0}
        scenario = self.scenario
        too_few = scenario.hosts + scenario.spares - len(set(self.lost_for_good)) < scenario.min_hosts
        forming = self.healed_at + scenario.form_timeout / 2
        reported = self.cluster.store.too_few_hosts_at
        left = any(supervisor.left_alone for supervisor in self.cluster.supervisors)
        if too_few or left or (reported is not None and reported < forming):
            codes.add(TOO_FEW_HOSTS)
        return codes

    def _result(self) -> ScheduleResult:
        cluster = self.cluster
        codes = {s.exit_code for s in cluster.supervisors if s.exit_code is not None}
        return ScheduleResult(
            self.seed,
            self.scenario,
            self.faults,
            cluster.invariants.violations,
            codes,
            len(cluster.store.leases),
            self.loop.now,
            self.loop.events,
            cluster.network.messages,
            self.loop.trace or [],
        )


def run_schedule(seed: int, trace: bool = False) -> ScheduleResult:
    """Runs the schedule of a seed."""
    return Schedule(seed, trace).run()
