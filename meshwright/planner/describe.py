"""Descriptions of a plan and summaries of its estimate, shared by the search, the records and the pages."""

from __future__ import annotations

from dataclasses import fields, replace

from meshwright.base.topology.axes import ALL_AXES
from meshwright.base.topology.collectives import wire_bytes
from meshwright.planner.cost.estimate import CollectiveCost, Estimate, MemoryEstimate
from meshwright.planner.workload.planned_job import PlannedJob

MEMORY_CLASSES = tuple(field.name for field in fields(MemoryEstimate))
"""The classes of a memory estimate, in the order in which they are shown."""
MEMORY_LABELS = {
    "optimizer": "optimizer state",
    "unsharded": "unsharded parameters",
    "slack": "allocator overhead",
    "context": "device context",
}
"""The labels of classes of memory whose names say too little."""


def describe_layout(job: PlannedJob) -> str:
    """Returns the axes with their degrees, such as "shard 16 (optimizer) x tensor 2"."""
    layout = job.layout
    sharding = f" ({job.sharding})" if job.sharding != "none" else ""
    axes = [f"{axis} {getattr(layout, axis)}" + (sharding if axis == "shard" else "") for axis in layout.active_axes]
    return " x ".join(axes) or "one device"


def describe_execution(job: PlannedJob) -> str:
    """Returns what a plan decides besides the layout: micro-batches, schedule, context method, checkpointing."""
    parts = [f"micro-batch {job.batch.micro} x {job.batch.accumulation}"]
    if job.layout.pipeline > 1:
        stages = f" with {job.stages_per_rank} stages per rank" if job.stages_per_rank > 1 else ""
        parts.append(job.schedule + stages)
    if job.layout.context > 1:
        parts.append(f"{job.context_method} attention")
    if job.activation_checkpoint != "none":
        parts.append(f"{job.activation_checkpoint} activation checkpointing")
    if job.offload:
        parts.append("optimizer state in host memory")
    if is_compiled(job):
        parts.append("compiled")
    return ", ".join(parts)


def is_compiled(job: PlannedJob) -> bool:
    """Whether a Meshwright run compiles its blocks; what another trainer compiles is in its profile."""
    return job.trainer.fused_kernels and job.trainer.name.startswith("meshwright")


def describe_plan(job: PlannedJob) -> str:
    return f"{describe_layout(job)}; {describe_execution(job)}"


def phase_label(phase: str) -> str:
    """Returns the name of a phase; the phases named after an axis are the exposed communication of that axis."""
    return f"{phase} communication" if phase in ALL_AXES else phase


def memory_label(name: str) -> str:
    return MEMORY_LABELS.get(name, name)


def memory_by_class(memory: MemoryEstimate) -> dict[str, float]:
    """Returns the bytes of each class that is not empty."""
    return {name: getattr(memory, name) for name in MEMORY_CLASSES if getattr(memory, name)}


def exposed_seconds(plan: Estimate) -> float:
    """Returns the exposed communication of a step: the time in which a rank waits for collectives."""
    return sum(call.exposed_seconds for call in plan.calls)


def wire_bytes_per_step(plan: Estimate) -> float:
    """Returns the bytes that one rank sends in a step, by the ring algorithms."""
    return sum(call.calls * wire_bytes(call.collective, int(call.message_bytes), call.ranks) for call in plan.calls)


def sync_seconds(plan: Estimate) -> float:
    """Returns the seconds that a run records as its phase `sync`.

    These are the pipeline's bubble and transfers, or DDP's last all-reduce. Communication that is exposed inside
    forward and backward counts as part of them.
    """
    phases = ("bubble", "pipeline") if plan.job.layout.pipeline > 1 else ("replicate",)
    return sum(plan.phases.get(phase, 0.0) for phase in phases)


def recompute_seconds(plan: Estimate) -> float:
    """Returns the seconds of a step that activation checkpointing spends on recomputation."""
    return plan.phases.get("recompute", 0.0)


def lost_seconds(plan: Estimate) -> dict[str, float]:
    """Returns the seconds of a step that neither compute the model once nor update it, by cause."""
    return {
        "communication": exposed_seconds(plan),
        "recomputation": recompute_seconds(plan),
        "bubble": plan.phases.get("bubble", 0.0),
    }


def merged_calls(plan: Estimate) -> list[CollectiveCost]:
    """Returns the collectives of more than one rank; calls of the same kind, size and group are summed."""
    merged: dict[tuple[str, str, float, int, str], CollectiveCost] = {}
    for call in plan.calls:
        if call.ranks < 2 or call.calls <= 0:
            continue
        key = (call.axis, call.collective, call.message_bytes, call.ranks, call.link)
        if (same := merged.get(key)) is not None:
            call = replace(
                call,
                calls=call.calls + same.calls,
                seconds=call.seconds + same.seconds,
                exposed_seconds=call.exposed_seconds + same.exposed_seconds,
            )
        merged[key] = call
    return list(merged.values())
