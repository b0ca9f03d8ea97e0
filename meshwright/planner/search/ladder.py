"""The ladder from DDP to the plan: each step adds the one technique that resolves the current bottleneck.

The ladder starts with DDP. Devices without a sample are the first bottleneck, then memory, then time that is lost to
communication, recomputation or the pipeline bubble. Each step is the best plan that uses only the techniques added so
far. The ladder ends as soon as there is no bottleneck, or no remaining technique helps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.io import format_bytes, format_percent, format_seconds
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import (
    describe_plan,
    lost_seconds,
    memory_by_class,
    memory_label,
    merged_calls,
    wire_bytes_per_step,
)
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search import min_memory_candidate, search
from meshwright.planner.search.search_space import CHECKPOINT_MODES, SearchSpace

TECHNIQUES = {
    "activation_checkpoint": "activation checkpointing",
    "shard": "sharding (FSDP)",
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "pipeline": "pipeline parallelism",
    "expert": "expert parallelism",
}
"""What a step may add, the simplest first."""
BOTTLENECK_SHARE = 0.10
"""The share of a step from which on lost time is a bottleneck."""
MEMORY_ESTIMATES = 40
"""The memory estimates of the search for one step, in addition to the first ones of each combination of degrees."""
MIN_GAIN = 0.02
"""The share of the step time that a step added for speed has to save."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a plan."""

    kind: str
    """batch, memory, communication, recomputation, bubble or none."""
    excess: float
    """The devices without a sample, the bytes over the device's memory, or the seconds lost."""
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
    """What the step costs: step time, bytes and bubble, each compared with the step before it."""
    rejected: tuple[str, ...] = ()
    """The techniques that were tried and not added, each with its bottleneck."""


def build_ladder(cache: CostCache, chosen: Estimate) -> tuple[list[LadderStep], str]:
    """Returns the steps, and a sentence that compares the last step with the plan that the search chose."""
    techniques: tuple[str, ...] = ()
    plan, bottleneck = best_with(cache, techniques)
    steps = [LadderStep("", "DDP" + (" with the pinned settings" if cache.work.pinned else ""), plan, bottleneck)]
    while bottleneck.kind != "none" and (found := next_step(cache, techniques, steps[-1])) is not None:
        technique, plan, bottleneck, rejected = found
        techniques = (*techniques, technique)
        before = steps[-1]
        resolved = describe_resolved(before.bottleneck, bottleneck, before.estimate, plan)
        cost = describe_cost(before.estimate, plan)
        steps.append(LadderStep(technique, f"+ {TECHNIQUES[technique]}", plan, bottleneck, resolved, cost, rejected))
    return steps, compare_with_plan(steps[-1], chosen)


def search_space(cache: CostCache, techniques: tuple[str, ...]) -> SearchSpace:
    """Returns the space that uses only these techniques; tensor-parallel groups stay inside a node."""
    modes = CHECKPOINT_MODES if "activation_checkpoint" in techniques else CHECKPOINT_MODES[:1]
    return SearchSpace(frozenset(techniques) - {"activation_checkpoint"}, modes, cache.cluster.devices_per_node)


def best_with(cache: CostCache, techniques: tuple[str, ...]) -> tuple[Estimate, Bottleneck]:
    """Returns the best plan with these techniques and its bottleneck.

    The plan uses fewer devices if the batch does not divide over all of them, and is the one with the least memory if
    none fits.
    """
    space = search_space(cache, techniques)
    cache, idle_devices = usable_devices(cache, space)
    ranked = search(cache, space, top=1, max_memory_estimates=MEMORY_ESTIMATES).ranked
    if ranked:
        return ranked[0], find_bottleneck(ranked[0], idle_devices)
    smallest = min_memory_candidate(cache, space)
    assert smallest is not None  # one rank with one sample always divides
    return cache.estimate(smallest), find_bottleneck(cache.estimate(smallest), idle_devices)


def usable_devices(cache: CostCache, space: SearchSpace) -> tuple[CostCache, int]:
    """Returns a cache for the most devices that the batch divides over, and the number of idle devices."""
    total, batch = cache.cluster.device_count, cache.work.global_batch
    if min_memory_candidate(cache, space) is not None:
        return cache, 0
    divisors_of_devices = {n for n in range(1, min(total, batch * 64) + 1) if total % n == 0}
    divisors_of_batch = {n for n in range(1, min(total, batch) + 1) if batch % n == 0}
    for devices in sorted(divisors_of_devices | divisors_of_batch, reverse=True):
        fewer = CostCache(cache.work, cache.cluster.with_devices(devices))
        if min_memory_candidate(fewer, space) is not None:
            return fewer, total - devices
    return CostCache(replace(cache.work, pinned={}), cache.cluster.with_devices(1)), total - 1


def find_bottleneck(plan: Estimate, idle_devices: int = 0) -> Bottleneck:
    """Returns the first bottleneck of batch, memory and lost time."""
    job, memory = plan.job, plan.peak_memory
    if idle_devices:
        ranks = f"{job.layout.data_degree:,} data-parallel rank{'s' if job.layout.data_degree > 1 else ''}"
        message = (
            f"a global batch of {job.batch.global_:,} divides over {ranks}; {idle_devices:,} devices have no sample"
        )
        return Bottleneck("batch", idle_devices, message)
    capacity = job.cluster.device.memory
    if memory.total > capacity:
        name, largest = max(memory_by_class(memory).items(), key=lambda row: row[1])
        excess = memory.total - capacity
        message = (
            f"memory: {format_bytes(memory.total)} needed, {format_bytes(capacity)} available, {format_bytes(excess)} "
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


def next_step(
    cache: CostCache, techniques: tuple[str, ...], before: LadderStep
) -> tuple[str, Estimate, Bottleneck, tuple[str, ...]] | None:
    """Returns the first technique that resolves the bottleneck, with its plan, bottleneck and rejected alternatives.

    If none resolves it, the first technique that reduces it to at most twice the smallest reachable excess is taken.
    """
    rejected: dict[str, str] = {}
    reducing: list[tuple[float, str, Estimate, Bottleneck]] = []
    for technique, label in TECHNIQUES.items():
        no_experts = technique == "expert" and not cache.work.model.experts
        if technique in techniques or no_experts or not may_help(technique, before.bottleneck):
            continue
        plan, bottleneck = best_with(cache, (*techniques, technique))
        if resolves(before, plan, bottleneck):
            return technique, plan, bottleneck, tuple(rejected.values())
        if reduces(before.bottleneck, bottleneck):
            reducing.append((bottleneck.excess, technique, plan, bottleneck))
        rejected[technique] = f"{label}: {bottleneck.message}"
    if not reducing:
        return None
    enough = 2 * min(row[0] for row in reducing)
    _, technique, plan, bottleneck = next(row for row in reducing if row[0] <= enough)
    del rejected[technique]
    return technique, plan, bottleneck, tuple(rejected.values())


def may_help(technique: str, bottleneck: Bottleneck) -> bool:
    """Data-parallel techniques cannot help against too small a batch, nor recomputation against lost time."""
    useless = {"batch": ("activation_checkpoint", "shard", "expert"), "memory": ()}
    return technique not in useless.get(bottleneck.kind, ("activation_checkpoint",))


def resolves(before: LadderStep, plan: Estimate, bottleneck: Bottleneck) -> bool:
    """Whether a plan resolves the bottleneck before it; lost time has to become a gain that is worth a step."""
    if bottleneck_order(before.bottleneck) == 2:
        return bottleneck_order(bottleneck) >= 2 and plan.seconds < (1 - MIN_GAIN) * before.estimate.seconds
    return bottleneck_order(bottleneck) > bottleneck_order(before.bottleneck)


def bottleneck_order(bottleneck: Bottleneck) -> int:
    """The order in which bottlenecks are resolved: batch, memory, time, none."""
    return {"batch": 0, "memory": 1, "none": 3}.get(bottleneck.kind, 2)


def reduces(before: Bottleneck, after: Bottleneck) -> bool:
    return before.kind in ("batch", "memory") and after.kind == before.kind and after.excess < 0.99 * before.excess


def describe_resolved(before: Bottleneck, after: Bottleneck, old: Estimate, new: Estimate) -> str:
    if before.kind == "batch":
        remaining = after.excess if after.kind == "batch" else 0
        return f"devices without a sample {before.excess:,.0f} -> {remaining:,.0f}"
    if before.kind == "memory":
        return f"peak memory per rank {format_bytes(old.peak_memory.total)} -> {format_bytes(new.peak_memory.total)}"
    lost_before, lost_after = lost_seconds(old)[before.kind], lost_seconds(new)[before.kind]
    change = f"{before.kind} {format_seconds(lost_before)} -> {format_seconds(lost_after)}"
    if lost_after < lost_before:
        return change
    return f"step time reduced by {format_seconds(old.seconds - new.seconds)}, although {change}"


def describe_cost(old: Estimate, new: Estimate) -> str:
    wire = f"{format_bytes(wire_bytes_per_step(old))} -> {format_bytes(wire_bytes_per_step(new))}"
    costs = [f"step time {format_seconds(old.seconds)} -> {format_seconds(new.seconds)}", f"bytes sent per rank {wire}"]
    if new.phases.get("bubble", 0):
        costs.append(f"bubble {format_percent(new.phases['bubble'] / new.seconds)}")
    return ", ".join(costs)


def compare_with_plan(last: LadderStep, chosen: Estimate) -> str:
    """Compares the last step of the ladder with the plan that the search chose."""
    if Candidate.from_job(last.estimate.job) == Candidate.from_job(chosen.job):
        return "The last step is the plan."
    gain = last.estimate.seconds - chosen.seconds
    saved = last.estimate.peak_memory.total - chosen.peak_memory.total
    plan = f"The search chose {describe_plan(chosen.job)}"
    if last.bottleneck.kind in ("batch", "memory"):
        bottleneck = last.bottleneck.message
        return f"{plan}: no single technique resolves the last bottleneck ({bottleneck}); together they do."
    if gain > 0:
        faster = f"{format_seconds(gain)} ({format_percent(gain / last.estimate.seconds)}) faster than the last step"
        return f"{plan}: {faster}."
    return f"{plan}: as fast within 1%, {format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} memory."
