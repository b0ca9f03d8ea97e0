"""What each axis of a plan does to the model, the batch and the memory of a rank, in sentences with figures."""

from __future__ import annotations

from meshwright.io import format_bytes, format_count
from meshwright.planner.cost.estimate import Estimate

SHARDED_STATE = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("gradients", "optimizer"),
    "parameters": ("parameters", "gradients", "optimizer"),
}
"""by kind of sharding"""


def mechanism(estimate: Estimate) -> list[str]:
    """Axis by axis, outermost first."""
    job, model, held = estimate.job, estimate.job.model, estimate.peak_memory
    layout = job.layout
    told = []
    if layout.pipeline > 1:
        stages = f", {job.stages_per_rank} stages each" if job.stages_per_rank > 1 else ""
        told.append(
            f"pipeline {layout.pipeline}: {model.layers} layers over {layout.pipeline} ranks{stages}, about "
            f"{model.layers / layout.pipeline:.3g} a rank; {job.batch.accumulation} micro-batches by {job.schedule}."
        )
    if layout.replicate > 1:
        told.append(f"replicate {layout.replicate}: so many copies, each with {samples_per_step(estimate)}.")
    if layout.shard > 1:
        what = ", ".join(f"{name} ({format_bytes(getattr(held, name))} left)" for name in SHARDED_STATE[job.sharding])
        over = layout.shard * layout.context
        told.append(f"shard {layout.shard}: {what} divided over {over} ranks; {samples_per_step(estimate)} each.")
    if layout.context > 1:
        told.append(
            f"context {layout.context}: {job.sequence:,} tokens cut into pieces of {job.sequence // layout.context:,}, "
            f"attention by {job.context_method}."
        )
    if layout.tensor > 1:
        told.append(
            f"tensor {layout.tensor}: {model.heads} heads and {ffn_width(estimate):,} inner columns of every layer cut to "  # noqa: E501
            f"{model.heads // layout.tensor} and {ffn_width(estimate) // layout.tensor:,}, sequences between them."
        )
    if layout.expert > 1:
        told.append(
            f"expert {layout.expert}: {model.experts} experts a layer, {model.experts // layout.expert} a rank."
        )
    if job.activation_checkpoint != "none":
        told.append(
            f"recompute {job.activation_checkpoint}: {format_bytes(held.activations)} of activations are kept, the "
            f"rest computed again."
        )
    return told or [f"one device holds all of it: {format_bytes(held.total)}."]


def ffn_width(estimate: Estimate) -> int:
    model = estimate.job.model
    return model.expert_ffn or model.ffn


def samples_per_step(estimate: Estimate) -> str:
    batch = estimate.job.batch
    return f"{batch.local:,} samples a step ({batch.micro} x {batch.accumulation})"


def resident_bytes(estimate: Estimate, name: str) -> float:
    """Of a class; parameters that stay gathered beside their shards are what ranks hold alike."""
    held = estimate.peak_memory
    gathered = name == "parameters" and estimate.job.layout.shard > 1 and estimate.job.trainer.torch_native
    return float(held.unsharded if gathered else getattr(held, name))


def replicated(estimate: Estimate) -> str:
    """What ranks of different data hold alike."""
    job = estimate.job
    divided = SHARDED_STATE[job.sharding] if job.layout.shard > 1 else ()
    whole = [name for name in ("parameters", "gradients", "optimizer") if name not in divided]
    copies = job.layout.data_degree * job.layout.context if not divided else job.layout.replicate
    if whole:
        over = job.layout.data_degree * job.layout.context
        told = ", ".join(f"{name} {format_bytes(resident_bytes(estimate, name))}" for name in whole)
        return f"Over {over:,} ranks alike: {told}." if over > 1 else f"Nothing: one rank holds each part ({told})."
    return f"Over {copies} copies alike: the shards." if copies > 1 else "Nothing: every number has one owner."


def sharded(estimate: Estimate) -> str:
    job, held, layout = estimate.job, estimate.peak_memory, estimate.job.layout
    told = []
    if layout.shard > 1:
        over = layout.shard * layout.context
        told.append(f"{' and '.join(SHARDED_STATE[job.sharding])} over {over:,} ranks")
    if layout.tensor > 1:
        told.append(f"every matrix over {layout.tensor}")
    if layout.pipeline > 1:
        told.append(f"layers over {layout.pipeline}")
    if layout.context > 1:
        told.append(f"sequences over {layout.context}")
    if layout.expert > 1:
        told.append(f"experts over {layout.expert}")
    numbers = held.parameters / job.trainer.parameter_bytes
    rest = (
        f"; a rank keeps {format_bytes(held.parameters)} of parameters, {format_count(numbers)} of "
        f"{format_count(job.model.parameters)}"
    )
    return ("; ".join(told) if told else "Nothing but the batch") + rest + "."
