"""What each axis of a plan does to the model, the batch and the memory of a rank, in sentences with figures."""

from __future__ import annotations

from meshwright.base.io import format_bytes, format_count
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import memory_label
from meshwright.planner.workload.workload import count_samples

SHARDED_STATE = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("gradients", "optimizer"),
    "parameters": ("parameters", "gradients", "optimizer"),
}
"""The classes of memory that each sharding divides."""


def mechanism(plan: Estimate) -> list[str]:
    """Describes the plan axis by axis, outermost first."""
    job, model, memory, layout = plan.job, plan.job.model, plan.peak_memory, plan.job.layout
    sentences = []
    if layout.pipeline > 1:
        stages = f" in {job.stages_per_rank} stages per rank" if job.stages_per_rank > 1 else ""
        sentences.append(
            f"pipeline {layout.pipeline}: {model.layers} layers over {layout.pipeline} ranks{stages}, about "
            f"{model.layers / layout.pipeline:.3g} layers per rank; {job.batch.accumulation} micro-batches, schedule "
            f"{job.schedule}."
        )
    if layout.replicate > 1:
        sentences.append(f"replicate {layout.replicate}: each replica processes {samples_per_step(plan)}.")
    if layout.shard > 1:
        remaining = ", ".join(
            f"{memory_label(name)} ({format_bytes(getattr(memory, name))} per rank)"
            for name in SHARDED_STATE[job.sharding]
        )
        ranks = count_ranks(plan, layout.shard * layout.context)
        product = f" (shard {layout.shard} x context {layout.context})" if layout.context > 1 else ""
        sentences.append(
            f"shard {layout.shard}: {remaining} sharded over {ranks}{product}; each rank processes "
            f"{samples_per_step(plan)}."
        )
    if layout.context > 1:
        sentences.append(
            f"context {layout.context}: each rank has {job.sequence // layout.context:,} of the {job.sequence:,} "
            f"tokens of each sequence; {job.context_method} attention."
        )
    if layout.tensor > 1:
        sentences.append(f"tensor {layout.tensor}: {describe_tensor(model, layout.tensor)}.")
    if layout.expert > 1:
        sentences.append(
            f"expert {layout.expert}: {model.experts} experts per layer, {model.experts // layout.expert} per rank."
        )
    if job.activation_checkpoint != "none":
        sentences.append(
            f"activation checkpointing ({job.activation_checkpoint}): {format_bytes(memory.activations)} of "
            f"activations are kept, backward recomputes the rest."
        )
    return sentences or [f"one device holds the model and its optimizer state: {format_bytes(memory.total)}."]


def describe_tensor(model: Architecture | TracedModel, degree: int) -> str:
    if isinstance(model, TracedModel):
        sharded = sum(parameter.tp_dim is not None for parameter in model.spec.parameters)
        return f"each rank has 1 / {degree} of the {sharded} weights in the tensor-parallel plan"
    columns = model.expert_ffn or model.ffn
    return (
        f"{model.heads} heads and {columns:,} ffn columns per layer become {model.heads // degree} and "
        f"{columns // degree:,} per rank; activations between them are sharded along the sequence"
    )


def samples_per_step(plan: Estimate) -> str:
    batch = plan.job.batch
    return f"{count_samples(batch.local)} per step (micro-batch {batch.micro} x accumulation {batch.accumulation})"


def stay_unsharded(plan: Estimate) -> bool:
    """Whether FSDP shards the parameters and does not reshard them after forward, as with ZeRO-1 and ZeRO-2."""
    job = plan.job
    return job.layout.shard > 1 and job.sharding in ("optimizer", "gradients") and job.trainer.torch_native


def count_ranks(plan: Estimate, ranks: int) -> str:
    """States a number of data-parallel and context-parallel ranks, and among how many of them an expert is."""
    expert = plan.job.layout.expert
    if expert == 1:
        return f"{ranks:,} ranks"
    of_expert = ranks // expert
    return f"{ranks:,} ranks ({f'experts over {of_expert:,}' if of_expert > 1 else 'each expert on one'})"


def replicated(plan: Estimate) -> str:
    """Says what data-parallel ranks hold identically."""
    job = plan.job
    sharded_classes = SHARDED_STATE[job.sharding] if job.layout.shard > 1 else ()
    sizes = {
        memory_label(name): getattr(plan.peak_memory, name)
        for name in ("parameters", "gradients", "optimizer")
        if name not in sharded_classes
    }
    if stay_unsharded(plan):
        del sizes[memory_label("parameters")]
        sizes = {f"{memory_label('unsharded')} of a step": plan.peak_memory.unsharded, **sizes}
    if sizes:
        ranks = job.layout.data_degree * job.layout.context
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        if ranks > 1:
            return f"Replicated over {count_ranks(plan, ranks)}: {listed}."
        return f"Nothing: there is one replica ({listed})."
    if job.layout.replicate > 1:
        return f"The shards, over {job.layout.replicate} replicas."
    return "Nothing: every parameter, gradient and moment is on one rank."


def sharded(plan: Estimate) -> str:
    job, memory, layout = plan.job, plan.peak_memory, plan.job.layout
    parts = []
    if layout.shard > 1:
        ranks = count_ranks(plan, layout.shard * layout.context)
        parts.append(f"{', '.join(map(memory_label, SHARDED_STATE[job.sharding]))} over {ranks}")
    if layout.tensor > 1:
        parts.append(f"weight matrices over {layout.tensor} ranks")
    if layout.pipeline > 1:
        parts.append(f"layers over {layout.pipeline} ranks")
    if layout.context > 1:
        parts.append(f"sequences over {layout.context} ranks")
    if layout.expert > 1:
        parts.append(f"experts over {layout.expert} ranks")
    local_parameters = memory.parameters / job.trainer.parameter_bytes
    stored = f"{format_bytes(memory.parameters)} of parameters"
    local = (
        f"a rank updates {stored}, {format_count(local_parameters)} of {format_count(job.model.parameters)}, and has "
        f"{format_bytes(memory.unsharded)} of unsharded ones in a step"
        if stay_unsharded(plan)
        else f"a rank stores {stored}, {format_count(local_parameters)} of {format_count(job.model.parameters)}"
    )
    return f"{'; '.join(parts) if parts else 'Only the batch'}; {local}."
