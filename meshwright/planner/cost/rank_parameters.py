"""The layers and the parameters of each pipeline rank, and the process groups that the parameters are sharded over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.planner.cost.stage_parameters import StageLayers, pipeline_stages, stage_parameters
from meshwright.planner.hardware.links import GroupPlacement, group_placement
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import rank_of_stage


def group_placements(job: PlannedJob) -> dict[str, GroupPlacement]:
    """The placement of the process group of every axis on nodes. From the outermost to the innermost, the axes are
    pipeline, replicate, shard, context, tensor.
    """
    return _group_placements(job.layout, job.cluster.devices_per_node)


@cache
def _group_placements(layout: Layout, per_node: int) -> dict[str, GroupPlacement]:
    shards, replicas = layout.shard * layout.context, layout.replicate
    if layout.shard == 1:
        shards, replicas = 1, layout.replicate * layout.context
    tensor = layout.tensor
    return {
        "tensor": group_placement(per_node, tensor, 1),
        "context": group_placement(per_node, layout.context, tensor),
        "expert": group_placement(per_node, layout.expert, tensor if layout.expert <= layout.expert_axes_size else 1),
        "shard": group_placement(per_node, shards, tensor),
        "replicate": group_placement(per_node, replicas, tensor * shards),
        "pipeline": GroupPlacement(2, 2 if layout.ranks <= per_node else 1),
    }


LayerCounts = tuple[int, int, bool, bool]
"""Dense layers, MoE layers, whether the embedding is there, whether the head is there."""


def layer_counts_by_rank(job: PlannedJob) -> list[LayerCounts]:
    """The layers of each pipeline rank."""
    stages = layer_counts_by_stage(job)
    ranks, last = job.layout.pipeline, len(stages) - 1
    counts: list[LayerCounts] = [(0, 0, False, False)] * ranks
    for stage, (dense_layers, moe_layers) in enumerate(stages):
        rank = rank_of_stage(job.schedule, ranks, stage) if ranks > 1 else 0
        dense, moe, has_embedding, has_head = counts[rank]
        counts[rank] = (dense + dense_layers, moe + moe_layers, has_embedding or stage == 0, has_head or stage == last)
    return counts


def layer_counts_by_stage(job: PlannedJob) -> list[tuple[int, int]]:
    """The dense and the MoE layers of each stage."""
    return [(stage.dense_layers, stage.moe_layers) for stage in pipeline_stages(job)]


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one rank that are sharded over the same process group."""

    numel: float
    """the number of elements when unsharded"""
    is_expert: bool
    axis: str
    shards: GroupPlacement
    replicas: GroupPlacement


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank by process group."""

    groups: list[ParameterGroup]
    updated: float
    """the number of elements that the rank's optimizer updates"""


def rank_parameters(job: PlannedJob, counts: LayerCounts) -> RankParameters:
    layout, placements = job.layout, group_placements(job)
    moe_layers = counts[1]
    parameters = stage_parameters(
        job.model, StageLayers(*counts), layout.tensor, layout.expert, layout.pipeline == 1
    )  # fmt: skip
    groups = [ParameterGroup(parameters.dense, False, "shard", placements["shard"], placements["replicate"])]
    if moe_layers:
        over_tensor = layout.tensor if layout.expert > layout.expert_axes_size else 1
        ranks = max(1, layout.expert_axes_size * over_tensor // layout.expert)
        near = group_placement(job.cluster.devices_per_node, ranks, layout.tensor * layout.expert)
        shards, replicas = (
            (near, placements["replicate"]) if layout.shard > 1 else (GroupPlacement(1, 1), near)
        )  # fmt: skip
        groups.append(ParameterGroup(parameters.experts, True, "shard", shards, replicas))
    divisors = [group.shards.ranks if job.sharding != "none" else 1 for group in groups]
    return RankParameters(groups, sum(group.numel / divisor for group, divisor in zip(groups, divisors, strict=True)))
