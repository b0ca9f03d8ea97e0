"""Measures bandwidth and latency between pairs of hosts by messages that go there and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from meshwright.errors import PeerError, describe_exception
from meshwright.faults import fail_point
from meshwright.measure.preflight.measurements import PairMeasurement
from meshwright.measure.preflight.pair_schedule import PairSchedule
from meshwright.parallel.world import World

LATENCY_TRIPS = 10
"""Round trips of the smallest message."""
FIRST_BYTES = 64 << 10
"""Size of the first large message."""
LAST_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Size of the largest message by device type."""
GROWTH = 4
"""Ratio of the sizes of two messages in a row."""
TRIPS = 3
"""Round trips of every large message; the fastest one counts."""
NO_MESSAGES = "look at firewall and routes between them, and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"


def measure_pairs(
    world: World, hosts: Sequence[str], leaders: Sequence[int], group: dist.ProcessGroup | None, schedule: PairSchedule
) -> list[PairMeasurement]:
    """Runs the rounds of the schedule on the first rank of every host. The rank with the smaller number of a pair
    returns its measurement. `hosts` and `leaders` are the names and first ranks of the hosts.
    """
    me = leaders.index(world.rank)
    measured = []
    if group is not None and world.device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=world.device), group=group)  # connects the ranks of the group
    for pairs in schedule.rounds:
        dist.all_reduce(torch.zeros(()), group=group)  # the pairs of a round start together
        for first, second in pairs:
            if me not in (first, second):
                continue
            partner = Partner(world, leaders[second if me == first else first], group)
            try:
                if me == first:
                    measured.append(partner.measure((hosts[first], hosts[second]), schedule.round_seconds))
                else:
                    partner.answer()
            except RuntimeError as error:
                names, problem = f"{hosts[first]} and {hosts[second]}", describe_exception(error).splitlines()[0]
                raise PeerError(f"hosts {names} cannot exchange messages: {problem[:200]}", NO_MESSAGES) from None
    return measured


class Partner:
    """The other rank of a pair. The rank that measures says how many elements the next messages have."""

    def __init__(self, world: World, rank: int, group: dist.ProcessGroup | None) -> None:
        self.device, self.rank, self.group = world.device, rank, group

    def measure(self, hosts: tuple[str, str], seconds: float) -> PairMeasurement:
        """Measures with messages that grow until the next ones would not fit into the time."""
        start = time.monotonic()
        latency = median(self.round_trips(1, LATENCY_TRIPS)[1:]) / 2
        size, bandwidth = FIRST_BYTES, 0.0
        while True:
            fastest = min(self.round_trips(size // 4, TRIPS))
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

    def round_trips(self, elements: int, trips: int) -> list[float]:
        """Returns the seconds of each round trip."""
        self.announce(elements, trips)
        message = torch.zeros(elements, device=self.device)
        seconds = []
        for _ in range(trips):
            self.synchronize()
            start = time.perf_counter()
            fail_point("preflight.send", 0)
            self.send(message)
            self.receive(message)
            self.synchronize()
            seconds.append(max(1e-9, time.perf_counter() - start))
        return seconds

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
