"""Measures the collectives that a layout uses, in its own process groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from meshwright.base.topology.layout import Layout
from meshwright.core.parallel.world import World
from meshwright.ops.measure.collectives import COLLECTIVES, ELEMENT_BYTES
from meshwright.ops.measure.timing import TimingGroup
from meshwright.ops.preflight.measurements import GroupMeasurement

AXIS_COLLECTIVES: dict[str, tuple[str, ...]] = {
    "pipeline": ("send",),
    "replicate": ("all_reduce",),
    "shard": ("all_gather", "reduce_scatter"),
    "context": ("send",),
    "tensor": ("all_gather", "reduce_scatter"),
    "expert": ("all_to_all",),
}
"""Axis -> the collectives that carry most of its bytes."""
MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Size of the full message by device type."""


def new_group(ranks: list[int], timeout: float) -> dist.ProcessGroup:
    """Creates a process group; only its members call this, which is quick on any number of ranks.

    Torch names the group by its ranks and by the number of groups that a member has. So every rank of the job creates
    equally many groups, and none is destroyed before the process group of the job: a second group of the same ranks
    would find the addresses of the first one in the store.
    """
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True)
    return group


def measure_groups(world: World, layout: Layout, seconds: float, timeout: float) -> list[GroupMeasurement]:
    """Runs the collectives of every axis; all groups of an axis run at the same time. The first rank of a group returns
    its measurement.
    """
    axes = layout.active_axes
    share = seconds / max(1, sum(len(AXIS_COLLECTIVES[axis]) for axis in axes))
    measured = []
    for axis in axes:
        peers = layout.group(world.rank, axis)
        group = new_group(peers, timeout)
        timing = TimingGroup(len(peers), world.device, group)
        for collective in AXIS_COLLECTIVES[axis]:
            elements = -(-MESSAGE_BYTES[world.device.type] // (ELEMENT_BYTES * len(peers))) * len(peers)
            call = COLLECTIVES[collective](timing, peers, elements)
            taken = timing.median_seconds(call, share, slowest=True)
            if world.rank == peers[0]:
                measured.append(GroupMeasurement(axis, collective, tuple(peers), elements * ELEMENT_BYTES, taken))
    return measured
