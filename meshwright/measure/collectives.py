"""How fast ranks exchange messages, by collective, size and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from meshwright.measure.timing import TimeBudget, TimingGroup, fits_budget
from meshwright.planner.hardware.cluster import BandwidthCurve

MESSAGE_BYTES = {
    "cpu": [1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24],
    "cuda": [1 << 15, 1 << 20, 1 << 24, 1 << 27, 1 << 30],
}
"""Bytes of a whole message."""
UNIT = 4
"""Bytes of a number."""
# torch 2.13 has new names for these, and warns of the old ones.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bus_factor(collective: str, ranks: int) -> float:
    """What crosses a rank's link of every byte of a whole message (nccl-tests, PERFORMANCE.md)."""
    if collective == "send":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def measure_curves(crew: TimingGroup, peers: list[int], budget: float) -> list[BandwidthCurve]:
    """As they were measured: a rate that falls where the next size is faster stays as it is. `peers` are the global
    ranks of the group, in order. What is too slow for its share of the time is left out, but for the two smallest.
    """
    sizes = MESSAGE_BYTES[crew.device.type]
    allowance = TimeBudget(crew, budget, len(COLLECTIVES) * len(sizes))
    found = []
    for collective, make in COLLECTIVES.items():
        points: list[tuple[float, float]] = []
        each = 0.0
        for size in sizes:  # as many numbers for every rank
            whole, share = -(-size // (UNIT * crew.ranks)) * crew.ranks, allowance.next_share()
            if len(points) >= 2 and not fits_budget(each * whole, share):
                continue
            took = crew.median_seconds(make(crew, peers, whole), share, slowest=True)
            each = took / whole
            points.append((float(whole * UNIT), whole * UNIT * bus_factor(collective, crew.ranks) / took))
        found.append(BandwidthCurve(collective, crew.ranks, tuple(points)))
    return found


Make = Callable[[TimingGroup, list[int], int], Callable[[], object]]


def all_reduce(crew: TimingGroup, _peers: list[int], whole: int) -> Callable[[], object]:
    return partial(dist.all_reduce, torch.zeros(whole, device=crew.device), group=crew.group)


def all_gather(crew: TimingGroup, _peers: list[int], whole: int) -> Callable[[], object]:
    gathered, own = (torch.zeros(size, device=crew.device) for size in (whole, whole // crew.ranks))
    return partial(GATHER, gathered, own, group=crew.group)


def reduce_scatter(crew: TimingGroup, _peers: list[int], whole: int) -> Callable[[], object]:
    own, added = (torch.zeros(size, device=crew.device) for size in (whole // crew.ranks, whole))
    return partial(SCATTER, own, added, group=crew.group)


def all_to_all(crew: TimingGroup, _peers: list[int], whole: int) -> Callable[[], object]:
    received, sent = (torch.zeros(whole, device=crew.device) for _ in range(2))
    return partial(dist.all_to_all_single, received, sent, group=crew.group)


def send(crew: TimingGroup, peers: list[int], whole: int) -> Callable[[], object]:
    """Around a ring: every rank sends to the next and receives from the one before."""
    sent, received = (torch.zeros(whole, device=crew.device) for _ in range(2))
    place = peers.index(dist.get_rank())
    after, before = peers[(place + 1) % len(peers)], peers[place - 1]

    def exchange() -> None:
        pair = [
            dist.P2POp(dist.isend, sent, after, group=crew.group),
            dist.P2POp(dist.irecv, received, before, group=crew.group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return exchange


COLLECTIVES: dict[str, Make] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send": send,
}
