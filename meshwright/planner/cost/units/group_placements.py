"""The placement of the process group of every axis on the nodes of a cluster."""

from __future__ import annotations

from functools import cache

from meshwright.base.hardware.adapters import senders_at_once
from meshwright.base.hardware.links import GroupPlacement, group_placement
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.units.data_sharding import DataSharding, data_sharding
from meshwright.planner.workload.planned_job import PlannedJob


def group_placements(job: PlannedJob) -> dict[str, GroupPlacement]:
    """The placement of the process group of every axis on nodes. From the outermost to the innermost, the axes are
    pipeline, replicate, shard, context, tensor. `unit_groups` has those of shards and replicas.
    """
    return _group_placements(job.layout, data_sharding(job), job.cluster.devices_per_node)


@cache
def _group_placements(layout: Layout, sharding: DataSharding, per_node: int) -> dict[str, GroupPlacement]:
    tensor = layout.tensor
    senders = senders_at_once(per_node, layout.ranks // layout.pipeline)
    return {
        "tensor": group_placement(per_node, tensor, 1),
        "context": group_placement(per_node, layout.context, tensor),
        "expert": group_placement(per_node, layout.expert, sharding.expert_stride),
        "pipeline": GroupPlacement(2, 2) if layout.ranks <= per_node else GroupPlacement(2, 1, senders),
    }
