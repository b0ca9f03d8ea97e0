"""Figures as a person reads them."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.cost.estimate import CollectiveCost, Estimate, MemoryEstimate
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.collectives import wire_bytes

MEMORY_CLASSES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "unsharded",
    "communication",
    "slack",
    "context",
)
"""of memory, as they are shown"""


def describe_layout(job: PlannedJob) -> str:
    """The axes and what is divided along them."""
    layout = job.layout
    kind = f" ({job.sharding})" if job.sharding != "none" else ""
    told = [f"{axis} {getattr(layout, axis)}" + (kind if axis == "shard" else "") for axis in layout.active_axes]
    return " x ".join(told) or "one device"


def describe_execution(job: PlannedJob) -> str:
    """The rest of what a plan decides."""
    told = [f"micro {job.batch.micro} x {job.batch.accumulation}"]
    if job.layout.pipeline > 1:
        told.append(job.schedule + (f" of {job.stages_per_rank} stages a rank" if job.stages_per_rank > 1 else ""))
    if job.layout.context > 1:
        told.append(job.context_method)
    if job.activation_checkpoint != "none":
        told.append(f"recompute {job.activation_checkpoint}")
    return ", ".join(told)


def describe_plan(job: PlannedJob) -> str:
    return f"{describe_layout(job)}; {describe_execution(job)}"


def memory_by_class(memory: MemoryEstimate) -> dict[str, float]:
    """Bytes by class, those that are there, in the order in which they are shown."""
    return {name: getattr(memory, name) for name in MEMORY_CLASSES if getattr(memory, name)}


def exposed_seconds(estimate: Estimate) -> float:
    """Seconds of a step in which a rank waits for messages."""
    return sum(call.exposed_seconds for call in estimate.calls)


def wire_bytes_per_step(estimate: Estimate) -> float:
    """Bytes that one rank sends in a step, by the ring count."""
    return sum(call.calls * wire_bytes(call.collective, int(call.message_bytes), call.ranks) for call in estimate.calls)


def sync_seconds(estimate: Estimate) -> float:
    """Of the step's seconds, those that a run records as its phase `sync`: waiting for neighbours in a pipeline, or for
    the last sums of whole copies. What passes wait for inside themselves is part of forward and backward.
    """
    phases = ("bubble", "pipeline") if estimate.job.layout.pipeline > 1 else ("replicate",)
    return sum(estimate.phases.get(phase, 0.0) for phase in phases)


def recompute_seconds(estimate: Estimate) -> float:
    """Seconds of a step in which what was computed is computed again."""
    computing = estimate.phases.get("forward", 0.0) + estimate.phases.get("backward", 0.0)
    return estimate.phases.get("recompute", computing * (1 - estimate.model_flops / estimate.hardware_flops))


def lost_seconds(estimate: Estimate) -> dict[str, float]:
    """Seconds of a step that neither go through the model nor update it, by what takes them."""
    return {
        "communication": exposed_seconds(estimate),
        "recomputation": recompute_seconds(estimate),
        "bubble": estimate.phases.get("bubble", 0.0),
    }


def merged_calls(estimate: Estimate) -> list[CollectiveCost]:
    """Collectives of more than one rank, those of one kind and size together."""
    found: dict[tuple[str, str, float, int, str], CollectiveCost] = {}
    for call in estimate.calls:
        if call.ranks < 2 or call.calls <= 0:
            continue
        key = (call.axis, call.collective, call.message_bytes, call.ranks, call.link)
        if (same := found.get(key)) is not None:
            call = replace(
                call,
                calls=call.calls + same.calls,
                seconds=call.seconds + same.seconds,
                exposed_seconds=call.exposed_seconds + same.exposed_seconds,
            )
        found[key] = call
    return list(found.values())
