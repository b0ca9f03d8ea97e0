"""What of a model each rank of a job has: layers by pipeline rank, parameters by the ranks that share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.config import ModelConfig
from meshwright.plan.job import Job
from meshwright.plan.links import Place, place_of
from meshwright.plan.stack import Stack
from meshwright.plan.stages import spans
from meshwright.schedule import holder


def places_of(job: Job) -> dict[str, Place]:
    """Where the ranks of every axis stand: pipeline outermost, then copies, shards, pieces and matrices."""
    layout, cluster = job.layout, job.cluster
    shards, copies = layout.shard * layout.context, layout.replicate
    if layout.shard == 1:
        shards, copies = 1, layout.replicate * layout.context
    inner = layout.tensor
    whole = layout.ranks // layout.pipeline
    return {
        "tensor": place_of(cluster, layout.tensor, 1),
        "context": place_of(cluster, layout.context, inner),
        "expert": place_of(cluster, layout.expert, inner if layout.expert <= layout.fold else 1),
        "shards": place_of(cluster, shards, inner),
        "copies": place_of(cluster, copies, inner * shards),
        "pipeline": Place(2, 2 if 2 * whole <= cluster.per_node else 1),
    }


Counts = tuple[int, int, bool, bool]
"""Dense layers, layers with experts, whether the embedding is there, whether the head is."""


def counts_of(job: Job) -> list[Counts]:
    """By rank of the pipeline."""
    stages = stage_counts(job)
    ranks, last = job.layout.pipeline, len(stages) - 1
    found = [[0, 0, False, False] for _ in range(ranks)]
    for stage, (dense, banks) in enumerate(stages):
        mine = found[holder(job.schedule, ranks, stage) if ranks > 1 else 0]
        mine[0] += dense
        mine[1] += banks
        mine[2] |= stage == 0
        mine[3] |= stage == last
    return [(dense, banks, bool(begins), bool(ends)) for dense, banks, begins, ends in found]


def stage_counts(job: Job) -> tuple[tuple[int, int], ...]:
    """Dense layers and layers with experts, by stage."""
    model, stages = job.model, job.layout.pipeline * (job.stages if job.layout.pipeline > 1 else 1)
    own = job.run.model if job.run is not None else None
    return _stage_counts(model.layers, model.dense_layers, bool(model.experts), stages, own, job.sequence, job.stack)


@cache
def _stage_counts(
    layers: int, dense: int, experts: bool, stages: int, own: ModelConfig | None, sequence: int, stack: Stack
) -> tuple[tuple[int, int], ...]:
    if own is not None:
        every = [len(blocks) for blocks in spans(own, sequence, stages)]
    else:
        every = divided(layers, stages, stack.ends_are_layers)
    found, begin = [], 0
    for count in every:
        plain = min(count, max(0, dense - begin)) if experts else count
        found.append((plain, count - plain))
        begin += count
    return tuple(found)


def divided(layers: int, stages: int, ends: bool) -> list[int]:
    """As evenly as it goes; embedding and head count as layers where that divides evenly, and the software does it."""
    if ends and stages > 2 and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    each, left = divmod(layers, stages)
    return [each + (stage < left) for stage in range(stages)]


@dataclass(frozen=True)
class Part:
    """Parameters of one rank that the same ranks share."""

    numbers: float
    """once they are gathered"""
    axis: str
    shards: Place
    copies: Place


@dataclass(frozen=True)
class Held:
    parts: list[Part]
    update: float
    """numbers that this rank's optimizer updates"""


def rank_parameters(job: Job, counts: Counts) -> Held:
    model, layout = job.model, job.layout
    dense, banks, begins, ends = counts
    places = places_of(job)
    shared = model.experts_shared * model.expert_weights
    matrices = (dense + banks) * model.attention_weights + dense * model.dense_weights + banks * shared
    vectors = (dense + banks) * model.vectors + banks * model.width * model.experts
    edge = model.vocab * model.width * ((begins + ends) if layout.pipeline > 1 or not model.tied else 1)
    whole = (matrices + edge) / layout.tensor + vectors
    parts = [Part(whole, "shard", places["shards"], places["copies"])]
    if banks:
        numbers = banks * model.experts * model.expert_weights / layout.expert
        rest = max(1, layout.fold * (layout.tensor if layout.expert > layout.fold else 1) // layout.expert)
        stride = layout.tensor * layout.expert
        sharded = layout.shard > 1
        near = place_of(job.cluster, rest, stride)
        parts.append(Part(numbers, "shard", near if sharded else Place(1, 1), places["copies"] if sharded else near))
    cut = [part.shards.ranks if job.sharding != "none" else 1 for part in parts]
    return Held(parts, sum(part.numbers / each for part, each in zip(parts, cut, strict=True)))
