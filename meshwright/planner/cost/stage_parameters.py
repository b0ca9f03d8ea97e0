"""How many numbers of a model's parameters one rank of a pipeline has, by how they are spread; torch-free.

| what | of a rank |
|---|---|
| attention, dense feed-forwards, shared experts, embedding, head | 1 / tensor of those on its stages |
| norms, biases, routers, positions | all of those on its stages |
| experts | 1 / expert of those on its stages |

Layers are divided evenly over stages; where they do not divide, embedding and head count as one layer each, as most
trainers do, and the first stages have what is left. Our own runs balance work (`stages.spans`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from meshwright.config import ModelConfig
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology import schedules
from meshwright.topology.stage_partition import partition_blocks


@dataclass(frozen=True)
class StageLayers:
    """One stage: how many layers of both kinds, and whether it has the ends."""

    dense: int
    experts: int
    first: bool
    last: bool
    hands: bool = False
    """the next stage is on the same rank"""
    takes: bool = False
    """the stage before is"""

    @property
    def layers(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class StageParameters:
    """Numbers that one rank has of a stage's parameters."""

    dense: float
    """all but experts that are divided"""
    bank: float
    """experts, where they are divided"""
    block: float
    """the largest block, without experts that are divided"""
    block_bank: float
    """experts of a block, where they are divided"""
    down: float
    """the last matrix of a block's feed-forward, whose gradient comes first"""
    embedding: float
    head: float
    """with the last norm"""
    copied: float
    """of `head`, what is a copy of the embedding"""

    @property
    def all(self) -> float:
        return self.dense + self.bank


def stages_by_rank(job: PlannedJob) -> list[tuple[StageLayers, ...]]:
    """The stages of every rank of the pipeline."""
    every = stages_of(job)
    return (
        parts_at(every, job.schedule, job.layout.pipeline, job.stages_per_rank) if job.layout.pipeline > 1 else [every]
    )


def stages_of(job: PlannedJob) -> tuple[StageLayers, ...]:
    """Of the whole pipeline; without one, the model."""
    if job.layout.pipeline == 1:
        return division(job.model, 1, None, 0)
    run = job.run_config.model if job.run_config is not None else None
    return division(job.model, job.layout.pipeline * job.stages_per_rank, run, job.sequence if run else 0)


@cache
def parts_at(every: tuple[StageLayers, ...], kind: str, ranks: int, each: int) -> list[tuple[StageLayers, ...]]:
    held = [schedules.stages_on_rank(kind, ranks, place, each) for place in range(ranks)]
    return [
        tuple(replace(every[stage], hands=stage + 1 in mine, takes=stage - 1 in mine) for stage in mine)
        for mine in held
    ]


@cache
def division(model: Architecture, stages: int, run: ModelConfig | None, sequence: int) -> tuple[StageLayers, ...]:
    blocks = partition_blocks(run, sequence, stages) if run is not None else partition_evenly(model.layers, stages)
    parts = []
    for index, span in enumerate(blocks):
        experts = len([layer for layer in span if model.is_moe_layer(layer)])
        parts.append(StageLayers(len(span) - experts, experts, index == 0, index == stages - 1))
    return tuple(parts)


def partition_evenly(layers: int, stages: int) -> list[range]:
    """Contiguous runs. Ends count as layers where that, and only that, makes all stages alike."""
    ends = 0 if layers % stages == 0 or stages == 1 else 1
    each, more = divmod(layers + 2 * ends, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0], counts[-1] = max(0, counts[0] - ends), max(0, counts[-1] - ends)
    begins = [0, *accumulate(counts)]
    return [range(begin, begin + count) for begin, count in zip(begins, counts, strict=False)]


@cache
def stage_parameters(model: Architecture, part: StageLayers, tensor: int, expert: int, alone: bool) -> StageParameters:
    """`alone`: there is no pipeline, and a tied weight is there once."""
    cut = model.attention_parameters / tensor
    dense = cut + model.ffn_parameters / tensor + model.vector_parameters
    shared = model.experts_shared * model.expert_parameters / tensor
    gate = model.width if model.shared_expert_gate else 0
    routed = cut + shared + model.width * model.experts + gate + model.vector_parameters
    bank = model.experts * model.expert_parameters / expert
    apart = expert > 1
    block = routed + (0 if apart else bank)
    table = model.vocab * model.width / tensor
    norm = model.width * (2 if model.norm == "layer" else 1)
    embedding = (table + model.learned_positions * model.width) if part.first else 0.0
    tied = model.tied_embeddings and alone
    head = (0 if tied else table) + norm if part.last else 0.0
    return StageParameters(
        part.dense * dense + part.experts * block + embedding + head,
        part.experts * bank if apart else 0.0,
        block if part.experts else dense,
        bank if apart and part.experts else 0.0,
        ((shared or bank) if part.experts else model.ffn_parameters / tensor) / model.ffn_matrices,
        embedding,
        head,
        table if part.last and model.tied_embeddings and not alone else 0.0,
    )
