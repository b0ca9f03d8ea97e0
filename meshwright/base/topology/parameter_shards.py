"""What one rank has of every parameter: its local shard, its pipeline stage, its FSDP unit and its shard group.

FSDP2 shards and reduces over the ranks that process different tokens: data-parallel ranks, and context-parallel ranks,
which have different chunks of the same sequences. Expert weights under expert parallelism have a smaller shard group,
and each forms an FSDP unit of its own inside its block. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.parameter_shapes import ModelShape, ParameterShape, padded_numel, shard_shape
from meshwright.base.topology.schedules import partition_blocks, stages_on_rank


@dataclass(frozen=True)
class ShardGroup:
    """The ranks of an FSDP unit: `replicas` replicas of `shards` shards. Axis names are those of the CommCounter."""

    replicate_axis: str
    replicas: int
    shard_axis: str
    shards: int
    shard_index: int
    """the index of this rank's shard"""


@dataclass(frozen=True)
class ParameterShard:
    """One parameter on one rank."""

    name: str
    shape: tuple[int, ...]
    """the shape on this rank while FSDP2 has it unsharded"""
    stage: int
    unit: str
    shard_group: ShardGroup
    grad_is_partial: bool
    """whether tensor-parallel ranks hold the same parameter and process different tokens, so that their gradients are
    partial sums
    """
    is_tied_copy: bool = False
    """whether it is a copy of a weight that another pipeline stage owns"""
    is_tied: bool = False
    """whether it is such a copy, or has one in another pipeline stage"""
    trainable: bool = True
    """whether it has a gradient and optimizer state"""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def padded_numel(self) -> int:
        return padded_numel(self.shape, self.shard_group.shards)

    @property
    def padded_shard_numel(self) -> int:
        return self.padded_numel // self.shard_group.shards

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard, without padding."""
        return shard_shape(self.shape, self.shard_group.shards, self.shard_group.shard_index)

    @property
    def shard_numel(self) -> int:
        return prod(self.shard_shape)


Units = dict[str, list[ParameterShard]]
"""FSDP unit -> its parameters."""


@dataclass(frozen=True)
class PipelinePlacement:
    """The stages of one rank and the blocks of each. Without a pipeline there is one stage, with all blocks."""

    stages: dict[int, range]
    stage_count: int
    """the stages of the whole pipeline"""

    @property
    def has_first_stage(self) -> bool:
        return 0 in self.stages

    @property
    def has_last_stage(self) -> bool:
        return self.stage_count - 1 in self.stages

    @property
    def layers(self) -> int:
        return sum(map(len, self.stages.values()))


def pipeline_placement(
    config: RunConfig, layout: Layout, rank: int, block_costs: tuple[float, ...]
) -> PipelinePlacement:
    """The stages of a rank. `block_costs` has the cost of every block of the model."""
    if layout.pipeline == 1:
        return PipelinePlacement({0: range(len(block_costs))}, 1)
    per_rank = stages_per_rank(config)
    stages = partition_blocks(block_costs, layout.pipeline * per_rank)
    pipeline_rank = layout.coordinates(rank)["pipeline"]
    local = stages_on_rank(config.pipeline.schedule, layout.pipeline, pipeline_rank, per_rank)
    return PipelinePlacement({stage: stages[stage] for stage in local}, len(stages))


def dense_shard_group(layout: Layout, rank: int) -> ShardGroup:
    """The shard group of all parameters but divided expert weights. The context axis joins the shard axis, or the
    replicate axis if nothing is sharded.
    """
    context_suffix = "+context" if layout.context > 1 else ""
    if layout.shard == 1:
        return ShardGroup(f"replicate{context_suffix}", layout.replicate * layout.context, "shard", 1, 0)
    coordinates = layout.coordinates(rank)
    index = coordinates["shard"] * layout.context + coordinates["context"]
    return ShardGroup("replicate", layout.replicate, f"shard{context_suffix}", layout.shard * layout.context, index)


def expert_shard_group(layout: Layout, rank: int) -> ShardGroup:
    """The shard group of expert weights: the ranks that hold the same experts."""
    if layout.expert == 1:
        return dense_shard_group(layout, rank)
    same_experts = layout.expert_axes_size // layout.expert
    if layout.shard == 1:
        return ShardGroup("expert_replicate", same_experts, "expert_shard", 1, 0)
    index = layout.coordinates(rank)["expert_shard"]
    return ShardGroup("expert_replicate", layout.replicate, "expert_shard", same_experts, index)


def uses_fsdp(layout: Layout) -> bool:
    """Whether FSDP2 wraps the model. Otherwise DDP does, or no two ranks process different tokens."""
    return not uses_ddp(layout) and layout.data_degree * layout.context > 1


def uses_ddp(layout: Layout) -> bool:
    """Whether DDP wraps the model: every rank holds a full replica."""
    different_tokens = layout.data_degree * layout.context > 1
    return different_tokens and set(layout.active_mesh_axes) <= {"replicate", "context"} and layout.expert == 1


def parameter_shards(model: ModelShape, config: RunConfig, layout: Layout, rank: int = 0) -> list[ParameterShard]:
    """All parameters of a rank, in model order."""
    placement = pipeline_placement(config, layout, rank, model.block_costs(config.data.sequence))
    pipeline = layout.pipeline > 1
    names = model.block_names
    stage_of_unit = {names[block]: stage for stage, blocks in placement.stages.items() for block in blocks}
    stage_of_unit["root"] = 0
    if placement.has_first_stage:
        stage_of_unit["before"] = 0
    if placement.has_last_stage:
        stage_of_unit["after"] = placement.stage_count - 1
    dense_group, expert_group = dense_shard_group(layout, rank), expert_shard_group(layout, rank)

    def shard(parameter: ParameterShape) -> ParameterShard:
        expert_parallel = parameter.is_expert_weight and layout.expert > 1
        return ParameterShard(
            parameter.name,
            parameter.local_shape(layout.tensor, layout.expert),
            stage_of_unit[parameter.unit],
            parameter.name.rpartition(".")[0] if expert_parallel else parameter.unit,
            expert_group if expert_parallel else dense_group,
            grad_is_partial=layout.tensor > 1 and parameter.tp_dim is None and parameter.trainable,
            is_tied_copy=pipeline and parameter.name in model.tied,
            is_tied=pipeline and parameter.name in {*model.tied, *model.tied.values()},
            trainable=parameter.trainable,
        )

    parameters = model.untied_parameters if pipeline else model.parameters
    return [shard(parameter) for parameter in parameters if parameter.unit in stage_of_unit]


def group_by_unit(shards: list[ParameterShard]) -> Units:
    """FSDP units in the order of use; expert weights follow the block that contains them."""
    units: Units = {}
    for shard in shards:
        units.setdefault(shard.unit, []).append(shard)
    return units
