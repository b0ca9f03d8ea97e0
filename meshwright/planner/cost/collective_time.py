"""Time of the collectives of one layer and one micro-batch: tensor, context and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.cost.layer_time import LayerShape, routed_tokens
from meshwright.planner.cost.rank_parameters import group_placements
from meshwright.planner.hardware.links import GroupPlacement, collective_seconds
from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True)
class CollectiveTime:
    """A number of equal collectives, and the time that they take together."""

    axis: str
    collective: str
    message_bytes: float
    calls: float
    placement: GroupPlacement
    seconds: float
    exposed: float
    """the part of `seconds` that is not overlapped with computation"""

    def times(self, count: float) -> CollectiveTime:
        return replace(
            self, calls=self.calls * count, seconds=self.seconds * count, exposed=self.exposed * count
        )  # fmt: skip

    def overlapped_with(self, compute: float) -> CollectiveTime:
        """Returns the same collectives, exposed only as far as they take longer than the computation."""
        return replace(self, exposed=max(0.0, self.seconds - compute))


def collective_time(
    job: PlannedJob,
    axis: str,
    collective: str,
    message_bytes: float,
    calls: float,
    placement: GroupPlacement,
    overlap: float = 0.0,
) -> CollectiveTime:
    """`overlap` is the fraction of the time that is overlapped with computation."""
    seconds = calls * collective_seconds(job.cluster, collective, message_bytes, placement)
    return CollectiveTime(axis, collective, message_bytes, calls, placement, seconds, seconds * (1 - overlap))


def tensor_collectives(
    job: PlannedJob, shape: LayerShape, moe: bool
) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """The collectives of one layer, forward and backward. Of a mixture of experts, only shared experts are tensor
    parallel. Activation checkpointing repeats all-gathers, and reduce-scatters that are not the last one of the layer.
    """
    if job.layout.tensor == 1:
        return [], []
    placement, trainer = group_placements(job)["tensor"], job.trainer
    message_bytes = shape.tokens * job.model.width * shape.rate.element_bytes
    modules = 1 if moe and not job.model.experts_shared else 2
    full = job.activation_checkpoint == "full"

    def tensor_collective(collective: str, calls: float) -> CollectiveTime:
        return collective_time(job, "tensor", collective, message_bytes, calls, placement, trainer.tensor_overlap)

    if not trainer.sequence_parallel:
        backward_calls = modules * (2 if full else 1)
        return [tensor_collective("all_reduce", modules)], [tensor_collective("all_reduce", backward_calls)]
    recomputes = full or (job.activation_checkpoint == "selective" and trainer.torch_native)
    all_gathers = modules * (2 if recomputes else 1)
    all_gathers += modules if trainer.regathers_in_backward else 0
    reduce_scatters = modules + (modules - (1 if trainer.torch_native else 0) if full else 0)
    forward = [tensor_collective("all_gather", modules), tensor_collective("reduce_scatter", modules)]
    return forward, [tensor_collective("all_gather", all_gathers), tensor_collective("reduce_scatter", reduce_scatters)]


def context_collectives(
    job: PlannedJob, shape: LayerShape, attention: float
) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """The collectives of one layer, forward and backward. Ring attention overlaps its sends with attention, which takes
    `attention` seconds.
    """
    ranks = job.layout.context
    if ranks == 1:
        return [], []
    placement, model = group_placements(job)["context"], job.model
    element_bytes = shape.rate.element_bytes
    kv_bytes = element_bytes * shape.tokens * model.kv_heads * model.head_dim * 2 / job.layout.tensor
    if model.latent_attention is not None:
        mla = model.latent_attention
        kv_bytes = element_bytes * shape.tokens * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    if job.context_method == "all-to-all":
        qkvo_bytes = kv_bytes + element_bytes * shape.tokens * model.heads * model.head_dim * 2 / job.layout.tensor
        all_to_all = [collective_time(job, "context", "all_to_all", qkvo_bytes / 2, 2, placement)]
        return all_to_all, all_to_all
    if job.context_method == "gather":
        all_gather = [collective_time(job, "context", "all_gather", kv_bytes * ranks, 1, placement)]
        reduce_scatter = collective_time(job, "context", "reduce_scatter", kv_bytes * ranks, 1, placement)
        return all_gather, [*all_gather, reduce_scatter]
    pair = GroupPlacement(2, min(2, placement.ranks_per_node)) if placement.nodes == 1 else GroupPlacement(2, 1)
    forward = collective_time(job, "context", "send", kv_bytes, ranks - 1, pair)
    backward_calls = (1 + max(1.0, job.trainer.reduce_bytes / element_bytes)) * (ranks - 1)
    backward = collective_time(job, "context", "send", kv_bytes, backward_calls, pair)
    return [forward.overlapped_with(attention)], [backward.overlapped_with(2.5 * attention)]


def expert_collectives(job: PlannedJob, shape: LayerShape) -> list[CollectiveTime]:
    """The token dispatch and combine of one layer in forward; backward has the same."""
    if job.layout.expert == 1:
        return []
    placement, trainer = group_placements(job)["expert"], job.trainer
    fraction = deduplicated_fraction(job, placement) if trainer.deduplicates_tokens else 1.0
    elements, element_bytes = routed_tokens(shape) * job.model.width * fraction, shape.rate.element_bytes
    dispatch_bytes = elements * max(trainer.dispatch_bytes, element_bytes)
    return [
        collective_time(job, "expert", "all_to_all", dispatch_bytes, 1, placement),
        collective_time(job, "expert", "all_to_all", elements * element_bytes, 1, placement),
    ]


def deduplicated_fraction(job: PlannedJob, placement: GroupPlacement) -> float:
    """The fraction of token copies that is left if a token goes to each node once: the expected number of distinct
    nodes of K experts on N nodes, divided by K.
    """
    nodes, active = placement.nodes, job.model.experts_active
    return nodes * (1 - (1 - 1 / nodes) ** active) / active if nodes > 1 else 1.0
