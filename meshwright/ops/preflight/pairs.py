"""Measures bandwidth and latency between pairs of hosts by messages that go there and back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from meshwright.core.faults import fail_point
from meshwright.core.parallel.world import World
from meshwright.errors import PeerError, describe_exception
from meshwright.ops.preflight.judgement.network import PairReference
from meshwright.ops.preflight.measurements import PairMeasurement
from meshwright.ops.preflight.pair_schedule import PairSchedule, schedule_again

LATENCY_TRIPS = 10
"""Round trips of the smallest message; the median counts."""
FIRST_BYTES = 64 << 10
"""Size of the first large message."""
LAST_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Size of the largest message by device type."""
GROWTH = 4
"""Ratio of the sizes of two messages in a row."""
TRIPS = 3
"""Round trips of every large message; the fastest one counts."""
MAX_OVERRUN = 2.0
"""Rounds end once they have taken this multiple of their time: on a slow network, small messages are slow as well."""
MIN_OVERRUN = 5.0
"""Seconds that rounds may take in any case."""
NO_MESSAGES = "look at firewall and routes between them, and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class HostGroup:
    """The first ranks of several hosts, as seen from one of them."""

    hosts: tuple[str, ...]
    """the names of the hosts"""
    leaders: tuple[int, ...]
    """the first rank of each host"""
    world: World
    group: dist.ProcessGroup

    @property
    def number(self) -> int:
        """The number of this host."""
        return self.leaders.index(self.world.rank)

    def wait(self) -> None:
        """Returns once every host has called it."""
        self.longest(0.0)

    def longest(self, seconds: float) -> float:
        """The maximum over the hosts."""
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return float(value)


def measure_pairs(hosts: HostGroup, schedule: PairSchedule) -> list[PairMeasurement]:
    """Runs the rounds of the schedule, then slow pairs again. Returns the pairs in which this host has the smaller
    number.
    """
    if hosts.world.device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=hosts.world.device), group=hosts.group)  # connects the ranks
    measured = run_rounds(hosts, schedule)
    rows = torch.zeros(2, len(hosts.hosts), len(hosts.hosts), dtype=torch.float64)
    for (first, second), pair in measured.items():
        rows[:, first, second] = torch.tensor([pair.bandwidth, pair.latency], dtype=torch.float64)
    dist.all_reduce(rows, group=hosts.group)
    for key, pair in run_rounds(hosts, schedule_again(slow_pairs(rows, hosts), schedule.round_seconds)).items():
        best = max(pair, measured[key], key=lambda one: one.bandwidth)
        measured[key] = replace(best, latency=min(pair.latency, measured[key].latency))
    return list(measured.values())


def slow_pairs(rows: torch.Tensor, hosts: HostGroup) -> list[tuple[int, int]]:
    """The pairs to measure again, the same on every host; `rows` has bandwidth and latency by two hosts' numbers."""
    keys = [(first, second) for first, second in torch.nonzero(rows[0]).tolist()]
    pairs = [PairMeasurement("", "", float(rows[0][key]), float(rows[1][key]), 0) for key in keys]
    reference = PairReference.of(pairs)
    kind = hosts.world.device.type
    return [key for key, pair in zip(keys, pairs, strict=True) if reference.is_slow(pair, kind)]


def run_rounds(hosts: HostGroup, schedule: PairSchedule) -> dict[tuple[int, int], PairMeasurement]:
    """Runs rounds until they have taken twice their time. The host with the smaller number of a pair returns it."""
    me, names = hosts.number, hosts.hosts
    measured: dict[tuple[int, int], PairMeasurement] = {}
    start = time.monotonic()
    for pairs in schedule.rounds:
        if hosts.longest(time.monotonic() - start) > max(MIN_OVERRUN, MAX_OVERRUN * schedule.seconds):
            break
        for first, second in pairs:
            if me not in (first, second):
                continue
            partner = Partner(hosts.world, hosts.leaders[second if me == first else first], hosts.group)
            try:
                if me == first:
                    measured[first, second] = partner.measure((names[first], names[second]), schedule.round_seconds)
                else:
                    partner.answer()
            except RuntimeError as error:
                problem = describe_exception(error).splitlines()[0][:200]
                raise PeerError(
                    f"hosts {names[first]} and {names[second]} cannot exchange messages: {problem}", NO_MESSAGES
                ) from None
    return measured


class Partner:
    """The other rank of a pair. The rank that measures says how many elements the next messages have."""

    def __init__(self, world: World, rank: int, group: dist.ProcessGroup | None) -> None:
        self.device, self.rank, self.group = world.device, rank, group

    def measure(self, hosts: tuple[str, str], seconds: float) -> PairMeasurement:
        """Measures with messages that grow until the next ones would not fit into the time."""
        start = time.monotonic()
        latency = median(self.round_trips(1, LATENCY_TRIPS, seconds / 4)) / 2
        size, bandwidth = FIRST_BYTES, 0.0
        while True:
            fastest = min(self.round_trips(size // 4, TRIPS, seconds / 4))
            bandwidth = max(bandwidth, 2 * size / fastest)
            next_size = size * GROWTH
            expected = TRIPS * GROWTH * fastest
            if next_size > LAST_BYTES[self.device.type] or time.monotonic() - start + expected > seconds:
                break
            size = next_size
        self.announce(0, 0)
        return PairMeasurement(*hosts, bandwidth, latency, size)

    def answer(self) -> None:
        """Returns every message until the other rank announces an empty one."""
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.recv(header, self.rank, group=self.group)
            elements, trips = header.tolist()
            if not elements:
                return
            message = torch.zeros(min(elements, LAST_BYTES[self.device.type] // 4), device=self.device)
            for _ in range(trips):
                self.receive(message)
                fail_point("preflight.send", 0)
                self.send(message)
                self.synchronize()

    def round_trips(self, elements: int, most: int, seconds: float) -> list[float]:
        """Returns the seconds of round trips: as many as fit into the time, after the first one, which does not count
        unless it is the only one.
        """
        message = torch.zeros(elements, device=self.device)
        self.announce(elements, 1)
        first = self.round_trip(message)
        trips = min(most, int(seconds / first))
        if not trips:
            return [first]
        self.announce(elements, trips)
        return [self.round_trip(message) for _ in range(trips)]

    def round_trip(self, message: torch.Tensor) -> float:
        """Returns the seconds of one message there and back."""
        self.synchronize()
        start = time.perf_counter()
        fail_point("preflight.send", 0)
        self.send(message)
        self.receive(message)
        self.synchronize()
        return max(1e-9, time.perf_counter() - start)

    def announce(self, elements: int, trips: int) -> None:
        dist.send(torch.tensor([elements, trips], dtype=torch.int64), self.rank, group=self.group)

    def send(self, message: torch.Tensor) -> None:
        self.exchange(dist.P2POp(dist.isend, message, self.rank, group=self.group))

    def receive(self, message: torch.Tensor) -> None:
        self.exchange(dist.P2POp(dist.irecv, message, self.rank, group=self.group))

    def exchange(self, operation: dist.P2POp) -> None:
        """A batch uses the communicator of the group; a single NCCL send would create one for the pair."""
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
