"""Measures the bus bandwidth of collectives by message size and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from meshwright.base.hardware.cluster import BandwidthCurve
from meshwright.base.topology.collectives import wire_fraction
from meshwright.ops.measure.timing import TimeBudget, TimingGroup, fits_budget

MESSAGE_BYTES = {
    "cpu": [1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24],
    "cuda": [1 << 15, 1 << 20, 1 << 24, 1 << 27, 1 << 30],
}
"""Message sizes (of the full tensor) by device type."""
ELEMENT_BYTES = 4
"""Messages are float32 tensors."""
# torch 2.13 renames these collectives, and warns about the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bus_factor(collective: str, ranks: int) -> float:
    """Returns the bytes that cross the link of one rank per byte of the full message (nccl-tests, PERFORMANCE.md)."""
    numerator, denominator = wire_fraction(collective, ranks)
    return numerator / denominator


def measure_curves(group: TimingGroup, peers: list[int], budget: float) -> list[BandwidthCurve]:
    """Measures a bandwidth curve for every collective; curves are not smoothed.

    `peers` are the global ranks of the group, in order. A message that is too slow for its share of the budget is
    skipped, except for the two smallest ones.
    """
    sizes = MESSAGE_BYTES[group.device.type]
    shares = TimeBudget(group, budget, len(COLLECTIVES) * len(sizes))
    curves = []
    for collective, prepare in COLLECTIVES.items():
        points: list[tuple[float, float]] = []
        seconds_per_element = 0.0
        for size in sizes:
            elements = -(-size // (ELEMENT_BYTES * group.ranks)) * group.ranks  # a multiple of the number of ranks
            share = shares.next_share()
            if len(points) >= 2 and not fits_budget(seconds_per_element * elements, share):
                continue
            seconds = group.median_seconds(prepare(group, peers, elements), share, slowest=True)
            seconds_per_element = seconds / elements
            message_bytes = elements * ELEMENT_BYTES
            points.append((float(message_bytes), message_bytes * bus_factor(collective, group.ranks) / seconds))
        curves.append(BandwidthCurve(collective, group.ranks, tuple(points)))
    return curves


PrepareCall = Callable[[TimingGroup, list[int], int], Callable[[], object]]
"""(group, global ranks of the group, elements of the full message) -> the call to time"""


def all_reduce(group: TimingGroup, _peers: list[int], elements: int) -> Callable[[], object]:
    return partial(dist.all_reduce, torch.zeros(elements, device=group.device), group=group.group)


def all_gather(group: TimingGroup, _peers: list[int], elements: int) -> Callable[[], object]:
    output, shard = (torch.zeros(size, device=group.device) for size in (elements, elements // group.ranks))
    return partial(ALL_GATHER, output, shard, group=group.group)


def reduce_scatter(group: TimingGroup, _peers: list[int], elements: int) -> Callable[[], object]:
    shard, full = (torch.zeros(size, device=group.device) for size in (elements // group.ranks, elements))
    return partial(REDUCE_SCATTER, shard, full, group=group.group)


def all_to_all(group: TimingGroup, _peers: list[int], elements: int) -> Callable[[], object]:
    received, sent = (torch.zeros(elements, device=group.device) for _ in range(2))
    return partial(dist.all_to_all_single, received, sent, group=group.group)


def send(group: TimingGroup, peers: list[int], elements: int) -> Callable[[], object]:
    """Prepares a ring shift: every rank sends to the next rank and receives from the previous one."""
    sent, received = (torch.zeros(elements, device=group.device) for _ in range(2))
    index = peers.index(dist.get_rank())
    next_rank, previous_rank = peers[(index + 1) % len(peers)], peers[index - 1]

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, next_rank, group=group.group),
            dist.P2POp(dist.irecv, received, previous_rank, group=group.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange


COLLECTIVES: dict[str, PrepareCall] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send": send,
}
