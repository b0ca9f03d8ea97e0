"""The number of parameters of each pipeline stage on one rank; torch-free.

| parameters | on one rank |
|---|---|
| attention, dense feed-forwards, shared experts, embedding, head | 1 / tensor of those of its stages |
| norms, biases, routers, learned positions | all of those of its stages |
| experts | 1 / expert of those of its stages |

The layers of a hybrid model count with the mean of its kinds of blocks, with and without experts.

Layers are divided evenly over stages. If they do not divide, the embedding and the head count as one layer each, as in
most trainers, and the first stages get the remainder. Meshwright's own runs balance the work (`partition_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, singledispatch
from itertools import accumulate
from typing import Any

from meshwright.base.models.architecture import Architecture
from meshwright.base.topology import schedules
from meshwright.base.topology.schedules import partition_blocks
from meshwright.errors import ConfigError
from meshwright.planner.workload.optimizer_bytes import TrainedShares
from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True)
class StageLayers:
    """The layers of one pipeline stage."""

    dense_layers: int
    moe_layers: int
    is_first: bool
    is_last: bool
    next_on_rank: bool = False
    """whether the next stage is on the same rank"""
    previous_on_rank: bool = False
    """whether the previous stage is on the same rank"""

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


@dataclass(frozen=True)
class StageParameters:
    """Elements of a stage's parameters on one rank, when unsharded."""

    block: float
    """the largest block, without experts that are divided over ranks"""
    block_experts: float
    """experts of one block that are divided over ranks"""
    down_projection: float
    """the last matrix of a block's feed-forward, whose gradient backward computes first"""
    embedding: float
    head: float
    """the head with the final norm"""
    experts_in_block: float
    """experts of one block that count as part of it"""

    def trained_share(self, trained: TrainedShares) -> float:
        """The trained share of the elements of `block`."""
        return trained.block + self.experts_in_block / max(1.0, self.block) * (trained.experts - trained.block)


def stages_by_rank(job: PlannedJob) -> list[tuple[StageLayers, ...]]:
    """The stages of every pipeline rank."""
    stages = pipeline_stages(job)
    if job.layout.pipeline == 1:
        return [stages]
    return assign_stages(stages, job.schedule, job.layout.pipeline, job.stages_per_rank)


def pipeline_stages(job: PlannedJob) -> tuple[StageLayers, ...]:
    """All stages of the pipeline; without a pipeline, the model as one stage."""
    if job.layout.pipeline == 1:
        return divide_layers(job.model, 1, None)
    return divide_layers(job.model, job.layout.pipeline * job.stages_per_rank, job.block_costs)


@cache
def assign_stages(
    stages: tuple[StageLayers, ...], kind: str, ranks: int, stages_per_rank: int
) -> list[tuple[StageLayers, ...]]:
    by_rank = [schedules.stages_on_rank(kind, ranks, rank, stages_per_rank) for rank in range(ranks)]
    return [
        tuple(replace(stages[index], next_on_rank=index + 1 in own, previous_on_rank=index - 1 in own) for index in own)
        for own in by_rank
    ]


@singledispatch
def divide_layers(model: Any, stages: int, costs: tuple[float, ...] | None) -> tuple[StageLayers, ...]:
    """The layers of every stage."""
    raise NotImplementedError(type(model))


@divide_layers.register
@cache
def _(model: Architecture, stages: int, costs: tuple[float, ...] | None) -> tuple[StageLayers, ...]:
    ranges = partition_evenly(model.layers, stages) if costs is None else partition_blocks(costs, stages)
    divided = []
    for index, layers in enumerate(ranges):
        moe_layers = len([layer for layer in layers if model.is_moe_layer(layer)])
        divided.append(StageLayers(len(layers) - moe_layers, moe_layers, index == 0, index == stages - 1))
    return tuple(divided)


def partition_evenly(layers: int, stages: int) -> list[range]:
    """Contiguous ranges of layers. The embedding and the head count as layers if the layers alone do not divide."""
    if stages > layers + 2:
        raise ConfigError(
            f"{layers} layers, an embedding and a head cannot be divided into {stages} pipeline stages",
            "expected fewer stages",
        )
    ends = 0 if layers % stages == 0 or stages == 1 else 1
    quotient, remainder = divmod(layers + 2 * ends, stages)
    counts = [quotient + (stage < remainder) for stage in range(stages)]
    counts[0], counts[-1] = max(0, counts[0] - ends), max(0, counts[-1] - ends)
    starts = [0, *accumulate(counts)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


@singledispatch
def stage_parameters(
    model: Any, stage: StageLayers, tensor: int, expert: int, no_pipeline: bool, experts_apart: bool
) -> StageParameters:
    """Without a pipeline, tied embeddings exist once. Experts are counted apart if they are divided over ranks, or
    sharded over other ranks than the other parameters.
    """
    raise NotImplementedError(type(model))


@stage_parameters.register
@cache
def _(
    model: Architecture, stage: StageLayers, tensor: int, expert: int, no_pipeline: bool, experts_apart: bool
) -> StageParameters:
    dense_mixer, moe_mixer = (
        model.mean(moe, model.mixer_parameters) / tensor + model.mean(moe, model.kind_vector_parameters)
        for moe in (False, True)
    )
    dense = dense_mixer + model.mean(False, lambda kind: kind.ffn == "dense") * model.ffn_parameters / tensor
    shared = model.shared_expert_parameters / tensor
    gate = model.width if model.shared_expert_gate else 0
    moe = moe_mixer + shared + model.width * model.experts + gate
    experts = model.experts * model.expert_parameters / expert
    moe_block = moe + (0 if experts_apart else experts)
    table = model.vocab * model.width / tensor
    norm = model.width * (2 if model.norm == "layer" else 1)
    embedding = (table + model.learned_positions * model.width) if stage.is_first else 0.0
    tied = model.tied_embeddings and no_pipeline
    head = (0 if tied else table) + norm if stage.is_last else 0.0
    return StageParameters(
        moe_block if stage.moe_layers else dense,
        experts if experts_apart and stage.moe_layers else 0.0,
        ((shared or experts) if stage.moe_layers else model.ffn_parameters / tensor) / model.ffn_matrices,
        embedding,
        head,
        0.0 if experts_apart or not stage.moe_layers else experts,
    )
