"""Time over the operations of a trace: a device that computes, and a link that communicates beside it.

Collectives without a queue stop the computation. Those of a queue run beside it until it waits for the queue; what it
waits is exposed communication of that axis. Collectives of the same link, inside a node or between nodes, run one after
the other, in the order in which they were issued. Computation that runs beside a collective is slowed down
(contention). Rounds of a `Repeat` settle into a period after the second one, so that the third stands for those that
follow. The device and each link have periods of their own: collectives that nothing waits for may last longer than the
computation, and then queue up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, NamedTuple

from meshwright.planner.cost.trace.operations import Communicate, Compute, Operation, Repeat, Wait

DATA_PARALLEL = ("shard", "replicate", "contention")
SETTLED_ROUNDS = 3
"""The rounds of a `Repeat` that are walked; the last of them is the period of further ones."""
SAME_PERIOD = 1e-9
"""The relative difference of two periods that rounding explains."""


@dataclass
class PassTime:
    """Seconds of a pass by phase, and the exposed seconds of each of its collectives."""

    phases: dict[str, float] = field(default_factory=dict)
    exposed: dict[tuple[str, str, float], float] = field(default_factory=dict)
    """exposed seconds by axis, collective and message bytes"""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def dependent_seconds(self) -> float:
        """Without data parallelism: a stage gathers parameters before its input arrives, and reduces gradients after
        it has sent its output, so that no other stage waits for either.
        """
        return sum(seconds for phase, seconds in self.phases.items() if phase not in DATA_PARALLEL)


class Pending(NamedTuple):
    """A collective that runs beside the computation."""

    start: float
    end: float
    collective: Communicate


class TimeWalk:
    """The clock of the device and of the link."""

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self.now = 0.0
        self.link_free = {"intra-node": 0.0, "inter-node": 0.0}
        self.pending: dict[str, list[Pending]] = {}
        """the collectives of each queue that have been issued since computation waited for it"""
        self.phases: dict[str, float] = {}
        self.exposed: dict[tuple[str, str, float], float] = {}
        self.overlapped = 0.0

    def run(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Compute):
                self.advance(operation.phase, operation.seconds)
            elif isinstance(operation, Communicate):
                self.communicate(operation)
            elif isinstance(operation, Wait):
                self.wait(operation.queue)
            elif isinstance(operation, Repeat):
                self.repeat(operation)

    def advance(self, phase: str, seconds: float) -> None:
        if seconds > 0:
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
            self.now += seconds

    def expose(self, collective: Communicate, seconds: float) -> None:
        key = (collective.axis, collective.collective, collective.message_bytes)
        self.exposed[key] = self.exposed.get(key, 0.0) + seconds
        self.advance(phase_of(collective), seconds)

    def communicate(self, collective: Communicate) -> None:
        link = collective.placement.link
        start = max(self.link_free[link], self.now)
        if collective.queue:
            pending = self.pending.setdefault(collective.queue, [])
            if collective.follows and pending:
                start = max(start, pending[-1].end)
            self.link_free[link] = end = start + collective.seconds
            pending.append(Pending(start, end, collective))
            self.overlapped += collective.seconds
            return
        if link == "inter-node" and self.link_free[link] > self.now:  # those of the queues wait for the adapters
            self.link_free[link] = start + collective.seconds
            for queue, pending in self.pending.items():
                self.pending[queue] = [self.delay(each, link, collective.seconds) for each in pending]
        if collective.axis == "expert":  # a hidden all-to-all takes multiprocessors from the computation that hides it
            self.overlapped += min(collective.hidden, collective.seconds)
        self.expose(collective, max(0.0, collective.seconds - collective.hidden))

    def delay(self, pending: Pending, link: str, seconds: float) -> Pending:
        """What has not ended yet continues after a collective that stops the computation."""
        start, end, collective = pending
        if collective.placement.link != link or end <= self.now:
            return pending
        return Pending(start if start <= self.now else start + seconds, end + seconds, collective)

    def wait(self, queue: str) -> None:
        """Exposes the collectives of a queue that run until the last of them has ended, each as long as it runs."""
        begin = self.now
        running = [each for each in self.pending.pop(queue, ()) if each.end > begin]
        if not running:
            return
        running.sort(key=lambda each: each.end)
        until = running[-1].end
        self.overlapped -= min(until - begin, self.overlapped)
        shares, free = [], until
        for start, end, collective in reversed(running):
            share = max(0.0, min(end, free) - max(start, begin))
            free = min(free, max(start, begin))
            shares.append((collective, share))
        covered = sum(share for _, share in shares)  # less than the wait where a collective waited for a link
        for collective, share in shares:
            if share:
                self.expose(collective, share * (until - begin) / covered)
        self.now = until

    def repeat(self, repeated: Repeat) -> None:
        """Walks the rounds that change the state of the links, and adds the others, which repeat the last of them."""
        left = repeated.times
        while left > SETTLED_ROUNDS:
            for _ in range(SETTLED_ROUNDS - 1):
                self.run(repeated.operations)
            now, link_free = self.now, dict(self.link_free)
            earlier = {queue: list(pending) for queue, pending in self.pending.items()}
            phases, exposed, overlapped = dict(self.phases), dict(self.exposed), self.overlapped
            self.run(repeated.operations)
            left -= SETTLED_ROUNDS
            period = self.now - now
            link_periods = {link: free - link_free[link] for link, free in self.link_free.items()}
            equal = int(min(left, *(self.busy_rounds(link, period, busy) for link, busy in link_periods.items())))
            self.now += equal * period
            for queue, issued in self.pending.items():
                known = earlier.get(queue, [])
                last_round = issued[len(known) :] if issued[: len(known)] == known else issued
                repeats = [each for last in last_round for each in self.further(last, equal, link_periods)]
                self.pending[queue] = issued + repeats
            self.link_free = {link: free + equal * link_periods[link] for link, free in self.link_free.items()}
            add_growth(self.phases, phases, equal)
            add_growth(self.exposed, exposed, equal)
            self.overlapped += equal * (self.overlapped - overlapped)
            left -= equal
        for _ in range(left):
            self.run(repeated.operations)

    def further(self, last: Pending, rounds: int, periods: dict[str, float]) -> Iterator[Pending]:
        """The same collective in so many further rounds, from the first one that has not ended."""
        period = periods[last.collective.placement.link]
        first = max(1, ceil((self.now - last.end) / period)) if period > 0 else 1
        for number in range(first, rounds + 1):
            yield Pending(last.start + number * period, last.end + number * period, last.collective)

    def busy_rounds(self, link: str, period: float, busy: float) -> int | float:
        """The rounds before a link becomes idle that is occupied for less than the period of a round, and has
        collectives of earlier rounds to catch up with.
        """
        catches_up = period - busy
        if not busy or catches_up <= SAME_PERIOD * period:
            return inf
        return max(0, int((self.link_free[link] - self.now) / catches_up) - 1)

    def result(self) -> PassTime:
        """Ends the pass: computation waits for all collectives."""
        for queue in list(self.pending):
            self.wait(queue)
        self.advance("contention", self.contention * self.overlapped)
        return PassTime(self.phases, self.exposed)


def add_growth(now: dict[Any, float], before: dict[Any, float], times: int) -> None:
    """Adds so many times what was added since `before`."""
    for key, value in now.items():
        now[key] = value + times * (value - before.get(key, 0.0))


def phase_of(collective: Communicate) -> str:
    """The phase that the exposed time of a collective belongs to: the first axis of its group."""
    axis = collective.axis.split("+")[0].removeprefix("expert_")
    return "shard" if axis == "other" else "update" if axis == "optimizer" else axis


def pass_time(operations: Iterable[Operation], contention: float) -> PassTime:
    """Walks operations that begin and end with an idle link."""
    walk = TimeWalk(contention)
    walk.run(operations)
    return walk.result()
