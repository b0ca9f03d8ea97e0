"""What one rank holds: its part of each parameter, the stage and the unit of it, and the groups that it is spread over.

Parameters are spread over ranks that see other tokens: those with other samples, and those with other pieces of the
same sequences. Banks of experts that are divided are spread over fewer ranks, and are units of their own inside their
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from meshwright.config import RunConfig
from meshwright.topology import schedules
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.parameter_shapes import ParameterShape, decoder_parameter_shapes, padded_numel, shard_numel
from meshwright.topology.stage_partition import partition_blocks


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that FSDP2 spreads a unit over: copies of shards. Axes are named as the ledgers name them."""

    replicate_axis: str
    replicas: int
    shard_axis: str
    shards: int
    shard_index: int
    """of this rank among the shards"""


@dataclass(frozen=True)
class ParameterShard:
    name: str
    shape: tuple[int, ...]
    """of what the rank holds of it once it is gathered"""
    stage: int
    unit: str
    shard_group: ShardGroup
    grad_is_partial: bool
    """whether ranks of the tensor axis hold the same of it, and see other tokens: gradients are parts of a sum"""
    is_tied_copy: bool = False
    """of a weight that another stage owns"""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def padded_numel(self) -> int:
        return padded_numel(self.shape, self.shard_group.shards)

    @property
    def padded_shard_numel(self) -> int:
        """With the filling."""
        return self.padded_numel // self.shard_group.shards

    @property
    def shard_numel(self) -> int:
        return shard_numel(self.shape, self.shard_group.shards, self.shard_group.shard_index)


Units = dict[str, list[ParameterShard]]


@dataclass(frozen=True)
class PipelinePlacement:
    """A rank's place in the pipeline: which stages, and which blocks each of them has. Without one, the whole."""

    stages: dict[int, range]
    stage_count: int

    @property
    def has_first_stage(self) -> bool:
        return 0 in self.stages

    @property
    def has_last_stage(self) -> bool:
        return self.stage_count - 1 in self.stages

    @property
    def layers(self) -> int:
        return sum(map(len, self.stages.values()))


def pipeline_placement(config: RunConfig, layout: Layout, rank: int) -> PipelinePlacement:
    if layout.pipeline == 1:
        return PipelinePlacement({0: range(config.model.layers)}, 1)
    each = stages_per_rank(config)
    every = partition_blocks(config.model, config.data.sequence, layout.pipeline * each)
    place = layout.coordinates(rank)["pipeline"]
    mine = schedules.stages_on_rank(config.pipeline.schedule, layout.pipeline, place, each)
    return PipelinePlacement({stage: every[stage] for stage in mine}, len(every))


def dense_shard_group(layout: Layout, rank: int) -> ShardGroup:
    """Context is folded into the shards, or into the copies where nothing is sharded."""
    place, pieces = layout.coordinates(rank), "+context" if layout.context > 1 else ""
    if layout.shard == 1:
        return ShardGroup(f"replicate{pieces}", layout.replicate * layout.context, "shard", 1, 0)
    coordinate = place["shard"] * layout.context + place["context"]
    return ShardGroup("replicate", layout.replicate, f"shard{pieces}", layout.shard * layout.context, coordinate)


def expert_shard_group(layout: Layout, rank: int) -> ShardGroup:
    if layout.expert == 1:
        return dense_shard_group(layout, rank)
    rest = layout.expert_axes_size // layout.expert
    if layout.shard == 1:
        return ShardGroup("expert_replicate", rest, "expert_shard", 1, 0)
    coordinate = layout.coordinates(rank)["expert_shard"]
    return ShardGroup("expert_replicate", layout.replicate, "expert_shard", rest, coordinate)


def uses_fsdp(layout: Layout) -> bool:
    """Whether FSDP2 spreads the parameters; else ranks hold them whole, or DDP does."""
    return not uses_ddp(layout) and layout.data_degree * layout.context > 1


def uses_ddp(layout: Layout) -> bool:
    """Whether there is nothing but whole copies."""
    others = layout.data_degree * layout.context > 1
    return others and set(layout.active_mesh_axes) <= {"replicate", "context"} and layout.expert == 1


def parameter_shards(config: RunConfig, layout: Layout, rank: int = 0) -> list[ParameterShard]:
    """In the order of the model."""
    hold, model = pipeline_placement(config, layout, rank), config.model
    # A pipeline's last stage has a head of its own: of a tied weight, a copy.
    shapes = decoder_parameter_shapes(replace(model, tie=False) if layout.pipeline > 1 else model)
    stage_of = {f"decoder.blocks.{block}": stage for stage, blocks in hold.stages.items() for block in blocks}
    stage_of |= (
        {"whole": 0}
        | ({"embedding": 0} if hold.has_first_stage else {})
        | ({"head": hold.stage_count - 1} if hold.has_last_stage else {})
    )
    dense, bank = dense_shard_group(layout, rank), expert_shard_group(layout, rank)

    def piece(shape: ParameterShape) -> ParameterShard:
        apart = shape.is_expert_weight and layout.expert > 1
        return ParameterShard(
            shape.name,
            shape.local_shape(layout.tensor, layout.expert),
            stage_of[shape.unit],
            f"{shape.unit}.ffn.bank" if apart else shape.unit,
            bank if apart else dense,
            grad_is_partial=layout.tensor > 1 and shape.tp_dim is None,
            is_tied_copy=model.tie and layout.pipeline > 1 and shape.name == "head.weight",
        )

    return [piece(shape) for shape in shapes if shape.unit in stage_of]


def group_by_unit(pieces: list[ParameterShard]) -> Units:
    """What is gathered together, in the order of use: a bank after its block, which holds it."""
    units: Units = {}
    for piece in pieces:
        units.setdefault(piece.unit, []).append(piece)
    return units
