"""What of a model each rank of a job has: layers by pipeline rank, parameters by the ranks that share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.planner.cost.stage_parameters import StageLayers as Stage
from meshwright.planner.cost.stage_parameters import stage_parameters, stages_of
from meshwright.planner.hardware.links import GroupPlacement, group_placement
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import rank_of_stage


def places_of(job: PlannedJob) -> dict[str, GroupPlacement]:
    """Where the ranks of every axis stand: pipeline outermost, then copies, shards, pieces and matrices."""
    return _places(job.layout, job.cluster.devices_per_node)


@cache
def _places(layout: Layout, per_node: int) -> dict[str, GroupPlacement]:
    shards, copies = layout.shard * layout.context, layout.replicate
    if layout.shard == 1:
        shards, copies = 1, layout.replicate * layout.context
    inner = layout.tensor
    return {
        "tensor": group_placement(per_node, layout.tensor, 1),
        "context": group_placement(per_node, layout.context, inner),
        "expert": group_placement(per_node, layout.expert, inner if layout.expert <= layout.expert_axes_size else 1),
        "shards": group_placement(per_node, shards, inner),
        "copies": group_placement(per_node, copies, inner * shards),
        "pipeline": GroupPlacement(2, 2 if layout.ranks <= per_node else 1),
    }


Counts = tuple[int, int, bool, bool]
"""Dense layers, layers with experts, whether the embedding is there, whether the head is."""


def counts_of(job: PlannedJob) -> list[Counts]:
    """By rank of the pipeline."""
    stages = stage_counts(job)
    ranks, last = job.layout.pipeline, len(stages) - 1
    found = [[0, 0, False, False] for _ in range(ranks)]
    for stage, (dense, banks) in enumerate(stages):
        mine = found[rank_of_stage(job.schedule, ranks, stage) if ranks > 1 else 0]
        mine[0] += dense
        mine[1] += banks
        mine[2] |= stage == 0
        mine[3] |= stage == last
    return [(dense, banks, bool(begins), bool(ends)) for dense, banks, begins, ends in found]


def stage_counts(job: PlannedJob) -> list[tuple[int, int]]:
    """Dense layers and layers with experts, by stage."""
    return [(part.dense, part.experts) for part in stages_of(job)]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one rank that the same ranks share."""

    numbers: float
    """once they are gathered"""
    bank: bool
    """whether they are experts"""
    axis: str
    shards: GroupPlacement
    copies: GroupPlacement


@dataclass(frozen=True)
class RankParameters:
    parts: list[ParameterGroup]
    update: float
    """numbers that this rank's optimizer updates"""


def rank_parameters(job: PlannedJob, counts: Counts) -> RankParameters:
    model, layout = job.model, job.layout
    dense, banks, begins, ends = counts
    places = places_of(job)
    has = stage_parameters(model, Stage(dense, banks, begins, ends), layout.tensor, layout.expert, layout.pipeline == 1)
    parts = [ParameterGroup(has.dense, False, "shard", places["shards"], places["copies"])]
    if banks:
        rest = max(
            1,
            layout.expert_axes_size
            * (layout.tensor if layout.expert > layout.expert_axes_size else 1)
            // layout.expert,
        )
        stride = layout.tensor * layout.expert
        sharded = layout.shard > 1
        near = group_placement(job.cluster.devices_per_node, rest, stride)
        parts.append(
            ParameterGroup(
                has.bank,
                True,
                "shard",
                near if sharded else GroupPlacement(1, 1),
                places["copies"] if sharded else near,
            )
        )
    cut = [part.shards.ranks if job.sharding != "none" else 1 for part in parts]
    return RankParameters(parts, sum(part.numbers / each for part, each in zip(parts, cut, strict=True)))
