"""The ladder from DDP to the plan: each step adds one technique of the plan, and the last step is the plan.

The ladder starts with DDP and those techniques that are pinned. Devices without a sample are the first bottleneck, then
memory, then time that is lost to communication, recomputation or the pipeline bubble. Each step takes the technique of
the plan that resolves the current bottleneck, or reduces it the most, with the degree that it has in the plan; what is
left of the devices is data-parallel, and the micro-batch is the best one that fits. Where no bottleneck is left, the
technique with the largest gain comes next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.base.io import format_bytes, format_percent, format_seconds
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import (
    describe_plan,
    is_compiled,
    lost_seconds,
    memory_by_class,
    memory_label,
    merged_calls,
    wire_bytes_per_step,
)
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.choice import TIE_TOLERANCE, expected_seconds, memory_risk
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search_space import ModelParallelDegrees, fills_schedule, micro_batch_sizes

TECHNIQUES = {
    "compile": "torch.compile",
    "activation_checkpoint": "activation checkpointing",
    "shard": "sharding",
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "pipeline": "pipeline parallelism",
    "expert": "expert parallelism",
    "offload": "optimizer state in host memory",
}
"""What a step may add, the simplest first."""
SHARDING_NAMES = {"optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "FSDP (ZeRO-3)"}
PINS = {
    "compile": "compile.enabled",
    "activation_checkpoint": "activation_checkpoint.mode",
    "shard": "layout.shard",
    "offload": "optimizer.cpu_offload",
}
"""The config key of a technique, if it is not `layout.` and its name."""
BOTTLENECK_SHARE = 0.10
"""The share of a step from which on lost time is a bottleneck."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a plan."""

    kind: str
    """batch, memory, communication, recomputation, bubble or none."""
    excess: float
    """The devices without a sample, the bytes over the memory that may be used, or the seconds lost."""
    message: str


@dataclass(frozen=True)
class LadderStep:
    technique: str
    """The key of TECHNIQUES that the step adds; empty for DDP."""
    name: str
    estimate: Estimate
    bottleneck: Bottleneck
    resolved: str = ""
    """How the step changes the bottleneck of the step before it."""
    cost: str = ""
    """What the step changes: step time, bytes and bubble, each compared with the step before it."""
    rejected: tuple[str, ...] = ()
    """The techniques that were tried and are added later, each with its bottleneck."""


def build_ladder(cache: CostCache, chosen: Estimate) -> tuple[list[LadderStep], str]:
    """Returns the steps, of which the last is the chosen plan, and a sentence that compares it with the first step."""
    target = Candidate.from_job(chosen.job)
    comparable = cache.estimate(target)  # the chosen plan, as the other steps are estimated
    remaining = [name for name in TECHNIQUES if uses(chosen, target, name)]
    added = tuple(name for name in remaining if PINS.get(name, f"layout.{name}") in cache.work.pinned)
    remaining = [name for name in remaining if name not in added]
    plan, bottleneck = best_with(cache, target, added) if remaining else (chosen, limit_of(cache, chosen))
    steps = [LadderStep("", "DDP" + (" with the pinned settings" if cache.work.pinned else ""), plan, bottleneck)]
    while remaining:
        before, rejected = steps[-1], {}
        options: list[tuple[tuple[float, ...], str, Estimate, Bottleneck]] = []
        for name in remaining:
            last = len(remaining) == 1
            plan, bottleneck = comparable, limit_of(cache, chosen)
            if not last:
                plan, bottleneck = best_with(cache, target, (*added, name))
            options.append((urgency(before.bottleneck, plan, bottleneck), name, plan, bottleneck))
            rejected[name] = f"{TECHNIQUES[name]}: {bottleneck.message}"
        _, name, plan, bottleneck = min(options, key=lambda option: option[0])
        added, remaining = (*added, name), [other for other in remaining if other != name]
        worse = bottleneck_order(before.bottleneck) < 2
        later = tuple(text for other, text in rejected.items() if other != name and worse)
        steps.append(
            LadderStep(
                name,
                f"+ {technique_label(name, chosen)}",
                plan if remaining else chosen,
                bottleneck,
                describe_resolved(before.bottleneck, bottleneck, before.estimate, plan, chosen)
                + describe_micro_batch(before.estimate, plan),
                describe_cost(before.estimate, plan),
                later,
            )
        )
    return steps, compare_with_first(steps)


def technique_label(name: str, chosen: Estimate) -> str:
    if name == "shard":
        return f"sharding, {SHARDING_NAMES[chosen.job.sharding]}"
    return (
        f"{chosen.job.activation_checkpoint} {TECHNIQUES[name]}"
        if name == "activation_checkpoint"
        else TECHNIQUES[name]
    )


def uses(plan: Estimate, candidate: Candidate, technique: str) -> bool:
    """Whether a plan uses a technique."""
    if technique == "compile":
        return plan.job.trainer.name.startswith("meshwright") and plan.job.trainer.fused_kernels
    if technique == "activation_checkpoint":
        return candidate.activation_checkpoint != "none"
    if technique == "shard":
        return candidate.sharding != "none"
    if technique == "offload":
        return candidate.offload
    return bool(getattr(candidate.layout, technique) > 1)


def best_with(cache: CostCache, target: Candidate, techniques: tuple[str, ...]) -> tuple[Estimate, Bottleneck]:
    """Returns the target with these techniques only, and its bottleneck.

    It has the best micro-batch that fits, or the smallest one, and uses fewer devices if the batch does not divide over
    all of them.
    """
    cache, idle_devices = usable_devices(cache, target, techniques)
    candidates = list(partial_candidates(cache, target, techniques))
    fitting = [candidate for candidate in candidates if cache.fits(candidate)]
    if fitting:
        plan = min(map(cache.estimate, fitting), key=expected_seconds)
    else:
        plan = min(map(cache.estimate, candidates), key=lambda each: each.peak_memory.total)
    return plan, limit_of(cache, plan, idle_devices)


def ddp_bottleneck(cache: CostCache) -> tuple[Estimate, Bottleneck]:
    """Returns the best plan of DDP and its bottleneck."""
    return best_with(cache, Candidate(Layout(replicate=cache.cluster.device_count), 1), ())


def partial_candidates(cache: CostCache, target: Candidate, techniques: tuple[str, ...]) -> Iterator[Candidate]:
    """Yields the target with these techniques only, by micro-batch; without any, it is eager DDP."""
    layout, ranks = target.layout, cache.cluster.device_count
    degrees = {
        axis: getattr(layout, axis) if axis in techniques else 1 for axis in ("pipeline", "context", "tensor", "expert")
    }
    group = degrees["pipeline"] * degrees["context"] * degrees["tensor"]
    if ranks % group or cache.work.global_batch % (ranks // group):
        return
    data = ranks // group
    sharding = target.sharding if "shard" in techniques and data > 1 else "none"
    if sharding == "gradients" and degrees["pipeline"] > 1:
        sharding = "optimizer"
    # Shard groups stay as large as they are in the plan where they divide; otherwise all data-parallel ranks shard.
    shards = (layout.shard if layout.replicate > 1 and data % layout.shard == 0 else data) if sharding != "none" else 1
    partial = Layout(
        degrees["pipeline"], data // shards, shards, degrees["context"], degrees["tensor"], degrees["expert"]
    )
    if partial.expert_axes_size % partial.expert:
        return
    pipelined = degrees["pipeline"] > 1
    eager = "compile" not in techniques and cache.work.trainer is None and not cache.cluster.device.is_cpu
    start = Candidate(
        partial,
        1,
        sharding,
        target.activation_checkpoint if "activation_checkpoint" in techniques else "none",
        target.schedule if pipelined else "1f1b",
        target.stages_per_rank if pipelined else 1,
        target.context_method,
        target.offload and "offload" in techniques,
        False if eager else target.compile,
    )
    settings = ModelParallelDegrees(
        partial.pipeline, partial.context, partial.tensor, partial.expert, data, target.context_method
    )
    for micro in micro_batch_sizes(cache.work, settings):
        candidate = start._replace(micro=micro)
        micro_steps = cache.work.global_batch // data // micro
        if fills_schedule(candidate.schedule, partial.pipeline, micro_steps) and not cache.is_unsupported(candidate):
            yield candidate


def usable_devices(cache: CostCache, target: Candidate, techniques: tuple[str, ...]) -> tuple[CostCache, int]:
    """Returns a cache for the most devices that the batch divides over, and the number of idle devices."""
    total, batch = cache.cluster.device_count, cache.work.global_batch
    if next(partial_candidates(cache, target, techniques), None) is not None:
        return cache, 0
    divisors_of_devices = {n for n in range(1, min(total, batch * 64) + 1) if total % n == 0}
    divisors_of_batch = {n for n in range(1, min(total, batch) + 1) if batch % n == 0}
    for devices in sorted(divisors_of_devices | divisors_of_batch, reverse=True):
        fewer = CostCache(cache.work, cache.cluster.with_devices(devices))
        if next(partial_candidates(fewer, target, techniques), None) is not None:
            return fewer, total - devices
    raise AssertionError("one rank with one sample always divides")


def limit_of(cache: CostCache, plan: Estimate, idle_devices: int = 0) -> Bottleneck:
    return find_bottleneck(plan, idle_devices, cache.work.headroom)


def find_bottleneck(plan: Estimate, idle_devices: int = 0, headroom: float = 0.0) -> Bottleneck:
    """Returns the first bottleneck of batch, memory and lost time; `headroom` is the share of memory to leave free."""
    job, memory = plan.job, plan.peak_memory
    if idle_devices:
        ranks = f"{job.layout.data_degree:,} data-parallel rank{'s' if job.layout.data_degree > 1 else ''}"
        message = (
            f"a global batch of {job.batch.global_:,} divides over {ranks}; {idle_devices:,} devices have no sample"
        )
        return Bottleneck("batch", idle_devices, message)
    capacity = job.cluster.device.memory
    available = (1 - headroom) * capacity
    if memory.total > available:
        name, largest = max(memory_by_class(memory).items(), key=lambda row: row[1])
        excess = memory.total - available
        message = (
            f"memory: {format_bytes(memory.total)} needed, {format_bytes(available)} available, {format_bytes(excess)} "
            f"over; the largest part is {memory_label(name)}, {format_bytes(largest)}"
        )
        return Bottleneck("memory", excess, message)
    kind, lost = max(lost_seconds(plan).items(), key=lambda row: row[1])
    if lost <= BOTTLENECK_SHARE * plan.seconds:
        message = (
            f"none: {format_percent(memory.total / capacity)} of device memory used, "
            f"{format_percent(lost / plan.seconds)} of the step lost to {kind}"
        )
        return Bottleneck("none", 0, message)
    message = f"{kind}: {format_seconds(lost)}, {format_percent(lost / plan.seconds)} of the step"
    if kind == "communication":
        call = max(merged_calls(plan), key=lambda each: each.exposed_seconds)
        message += f"; the largest part is {call.axis} {call.collective}, {format_seconds(call.exposed_seconds)}"
    return Bottleneck(kind, lost, message)


def urgency(before: Bottleneck, plan: Estimate, after: Bottleneck) -> tuple[float, ...]:
    """The sort key of the techniques of a step: what resolves the bottleneck comes first, then what reduces it the most
    (to at most twice the smallest excess: one octave counts as equal), then what is fastest.
    """
    order = bottleneck_order(after)
    if bottleneck_order(before) >= 2:  # only time is lost: the fastest plan that keeps everything resolved
        return -min(order, 2), plan.seconds
    octave = float(after.excess > 0 and int(after.excess).bit_length())
    return -min(order, 2), octave if order < 2 else 0.0, plan.seconds


def bottleneck_order(bottleneck: Bottleneck) -> int:
    """The order in which bottlenecks are resolved: batch, memory, time, none."""
    return {"batch": 0, "memory": 1, "none": 3}.get(bottleneck.kind, 2)


def describe_resolved(before: Bottleneck, after: Bottleneck, old: Estimate, new: Estimate, chosen: Estimate) -> str:
    if before.kind == "batch":
        remaining = after.excess if after.kind == "batch" else 0
        return f"devices without a sample {before.excess:,.0f} -> {remaining:,.0f}"
    if before.kind == "memory":
        return f"peak memory per rank {format_bytes(old.peak_memory.total)} -> {format_bytes(new.peak_memory.total)}"
    gain = old.seconds - new.seconds
    effects = [f"step time {'reduced' if gain >= 0 else 'raised'} by {format_percent(abs(gain) / old.seconds)}"]
    if gain < 0:
        effects.append(why_slower(old, new, chosen))
    if before.kind != "none":
        lost = (format_seconds(lost_seconds(each)[before.kind]) for each in (old, new))
        effects.append(f"{before.kind} {' -> '.join(lost)}")
    return ", ".join(effects)


def describe_micro_batch(old: Estimate, new: Estimate) -> str:
    """States the micro-batch where a step changes it, because its effect is then not that of the technique alone."""
    before, after = old.job.batch.micro, new.job.batch.micro
    return "" if before == after else f", with micro-batch {after} instead of {before}"


def why_slower(old: Estimate, new: Estimate, chosen: Estimate) -> str:
    """Says why a step is in the ladder although the one before it is faster, and neither batch nor memory limits it."""
    if expected_seconds(new) < expected_seconds(old):
        risks = (format_percent(memory_risk(each)) for each in (old, new))
        return f"risk that it does not fit {' -> '.join(risks)}"
    if expected_seconds(chosen) < expected_seconds(old):
        return "which later steps make up for"
    if new.seconds <= (1 + TIE_TOLERANCE) * old.seconds:
        return f"within the {format_percent(TIE_TOLERANCE)} in which plans count as equally fast"
    return "because the search did not list the faster layout"


def describe_cost(old: Estimate, new: Estimate) -> str:
    wire = f"{format_bytes(wire_bytes_per_step(old))} -> {format_bytes(wire_bytes_per_step(new))}"
    costs = [f"step time {format_seconds(old.seconds)} -> {format_seconds(new.seconds)}", f"bytes sent per rank {wire}"]
    if new.phases.get("bubble", 0):
        costs.append(f"bubble {format_percent(new.phases['bubble'] / new.seconds)}")
    return ", ".join(costs)


def compare_with_first(steps: list[LadderStep]) -> str:
    """Compares the plan with DDP."""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return f"{first.name} is the plan."
    if first.bottleneck.kind in ("batch", "memory"):
        return f"The last step is the plan, {describe_plan(last.estimate.job)}. {first.name} does not run."
    gain = (first.estimate.seconds - last.estimate.seconds) / first.estimate.seconds
    gains_compile = is_compiled(last.estimate.job) and not is_compiled(first.estimate.job)
    name = first.name + (" without torch.compile" if gains_compile else "")
    faster = f"{format_percent(gain)} faster than {name}" if gain > 0 else f"as fast as {name}"
    return f"The last step is the plan, {describe_plan(last.estimate.job)}: {faster}."
