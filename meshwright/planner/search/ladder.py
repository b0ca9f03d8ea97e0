"""From DDP to the plan: at each rung what binds, and the one thing that is added because it removes that; torch-free.

The rule: begin with whole copies, and add only what removes the constraint that binds. Devices without a sample bind
first, then memory, then time that is lost to messages, to recomputation or to waiting in a pipeline. A rung is the best
plan of all that use nothing but what was added so far. The ladder ends as soon as nothing binds, or nothing that is
left helps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.io import format_bytes, format_percent, format_seconds
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan, lost_seconds, memory_by_class, merged_calls, wire_bytes_per_step
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.search import CostCache, min_memory_candidate, search
from meshwright.planner.search.search_space import CHECKPOINT_MODES, SearchSpace

TECHNIQUES = ("recompute", "shard", "tensor", "context", "pipeline", "expert")
"""What a rung may add, the least trouble first."""
BOTTLENECK_SHARE = 0.10
"""Time that is lost to one thing binds from this share of a step on."""
MEMORY_ESTIMATES = 40
"""plans of a rung, after one of every frame"""
MIN_GAIN = 0.02
"""A rung that is added for speed has to gain so much."""


@dataclass(frozen=True)
class Bottleneck:
    """What stands in the way of a plan."""

    kind: str
    """batch, memory, communication, recomputation, bubble or nothing"""
    excess: float
    """devices without a sample, bytes too many, or seconds lost"""
    message: str


@dataclass(frozen=True)
class LadderStep:
    name: str
    estimate: Estimate
    bottleneck: Bottleneck
    resolved: str
    """what of the rung before it removed"""
    cost: str
    """and at what price"""
    rejected: tuple[str, ...] = ()
    """what was not added, and why"""


def build_ladder(desk: CostCache, chosen: Estimate) -> tuple[list[LadderStep], str]:
    """(the rungs, how the last of them stands to the plan that the search chose)."""
    used: tuple[str, ...] = ()
    estimate, binding = best_with(desk, used)
    rungs = [LadderStep("DDP" + (", pins kept" if desk.work.pinned else ""), estimate, binding, "", "")]
    while binding.kind != "nothing" and (step := next_step(desk, used, rungs[-1])) is not None:
        added, estimate, binding, tried = step
        used = (*used, added)
        before = rungs[-1]
        told = describe_resolved(before.bottleneck, binding, before.estimate, estimate)
        rungs.append(LadderStep(f"+ {added}", estimate, binding, told, describe_cost(before.estimate, estimate), tried))
    return rungs, compare_with_plan(rungs[-1], chosen)


def search_space(desk: CostCache, used: tuple[str, ...]) -> SearchSpace:
    """Tensor groups stay inside a node."""
    recompute = CHECKPOINT_MODES if "recompute" in used else CHECKPOINT_MODES[:1]
    return SearchSpace(frozenset(used) - {"recompute"}, recompute, desk.cluster.devices_per_node)


def best_with(desk: CostCache, used: tuple[str, ...]) -> tuple[Estimate, Bottleneck]:
    """The best that there is with what was added so far: on fewer devices where the batch does not reach for all, and
    the lightest where nothing fits.
    """
    desk, idle = usable_devices(desk, search_space(desk, used))
    found = search(desk, search_space(desk, used), top=1, most=MEMORY_ESTIMATES).ranked
    if found:
        return found[0], find_bottleneck(found[0], idle)
    least = min_memory_candidate(desk, search_space(desk, used))
    assert least is not None  # one rank with one sample is always there
    return desk.time(least), find_bottleneck(desk.time(least), idle)


def usable_devices(desk: CostCache, space: SearchSpace) -> tuple[CostCache, int]:
    """The devices that have work, and how many have none."""
    whole = desk.cluster.device_count
    if min_memory_candidate(desk, space) is not None:
        return desk, 0
    for devices in sorted(
        {n for n in range(1, min(whole, desk.work.global_batch * 64) + 1) if whole % n == 0}
        | {n for n in range(1, min(whole, desk.work.global_batch) + 1) if desk.work.global_batch % n == 0},
        reverse=True,
    ):
        fewer = CostCache(desk.work, desk.cluster.with_devices(devices))
        if min_memory_candidate(fewer, space) is not None:
            return fewer, whole - devices
    return CostCache(replace(desk.work, pinned={}), desk.cluster.with_devices(1)), whole - 1


def find_bottleneck(estimate: Estimate, idle: int = 0) -> Bottleneck:
    """The first of batch, memory and communication that binds."""
    job, held = estimate.job, estimate.peak_memory
    if idle:
        ranks = f"{job.layout.data_degree:,} data-parallel rank{'s' if job.layout.data_degree > 1 else ''}"
        told = f"a batch of {job.batch.global_:,} divides over {ranks}, and {idle:,} devices have no sample"
        return Bottleneck("batch", idle, told)
    capacity = job.cluster.device.memory
    if held.total > capacity:
        name, most = max(memory_by_class(held).items(), key=lambda row: row[1])
        over = held.total - capacity
        told = (
            f"{format_bytes(held.total)} of {format_bytes(capacity)}, {format_bytes(over)} over; {name} "
            f"alone {format_bytes(most)}"
        )
        return Bottleneck("memory", over, told)
    kind, most = max(lost_seconds(estimate).items(), key=lambda row: row[1])
    if most <= BOTTLENECK_SHARE * estimate.seconds:
        told = (
            f"nothing: {format_percent(held.total / capacity)} of memory, "
            f"{format_percent(most / estimate.seconds)} lost to {kind}"
        )
        return Bottleneck("nothing", 0, told)
    told = f"{kind} takes {format_seconds(most)}, {format_percent(most / estimate.seconds)} of the step"
    if kind == "communication":
        call = max(merged_calls(estimate), key=lambda one: one.exposed_seconds)
        told += f"; most: {call.axis} {call.collective} {format_seconds(call.exposed_seconds)}"
    return Bottleneck(kind, most, told)


def next_step(
    desk: CostCache, used: tuple[str, ...], before: LadderStep
) -> tuple[str, Estimate, Bottleneck, tuple[str, ...]] | None:
    """The first that removes what binds; else the first that lessens it to twice what the best would leave, or less."""
    tried: list[str] = []
    better: list[tuple[float, str, Estimate, Bottleneck]] = []
    for added in TECHNIQUES:
        if (
            added in used
            or (added == "expert" and not desk.work.model.experts)
            or not may_help(added, before.bottleneck)
        ):
            continue
        estimate, binding = best_with(desk, (*used, added))
        if resolves(before, estimate, binding):
            return added, estimate, binding, tuple(tried)
        if reduces(before.bottleneck, binding):
            better.append((binding.excess, added, estimate, binding))
        tried.append(f"{added}: {binding.message}")
    if not better:
        return None
    enough = 2 * min(row[0] for row in better)
    _, added, estimate, binding = next(row for row in better if row[0] <= enough)
    rest = tuple(told for told in tried if not told.startswith(f"{added}: "))
    return added, estimate, binding, rest


def may_help(added: str, binding: Bottleneck) -> bool:
    """Copies and shards need samples; recomputation takes time."""
    return added not in {"batch": ("recompute", "shard", "expert"), "memory": ()}.get(binding.kind, ("recompute",))


def resolves(before: LadderStep, estimate: Estimate, binding: Bottleneck) -> bool:
    """Where time is lost there has to be a gain, and it has to be worth a rung."""
    if bottleneck_order(before.bottleneck) == 2:
        return bottleneck_order(binding) >= 2 and estimate.seconds < (1 - MIN_GAIN) * before.estimate.seconds
    return bottleneck_order(binding) > bottleneck_order(before.bottleneck)


def bottleneck_order(binding: Bottleneck) -> int:
    """Of what binds: first the batch, then memory, then time."""
    return {"batch": 0, "memory": 1, "nothing": 3}.get(binding.kind, 2)


def reduces(before: Bottleneck, binding: Bottleneck) -> bool:
    return before.kind in ("batch", "memory") and binding.kind == before.kind and binding.excess < 0.99 * before.excess


def describe_resolved(before: Bottleneck, after: Bottleneck, was: Estimate, now: Estimate) -> str:
    if before.kind == "batch":
        return f"devices without a sample {before.excess:,.0f} -> {after.excess if after.kind == 'batch' else 0:,.0f}"
    if before.kind == "memory":
        return f"heaviest rank {format_bytes(was.peak_memory.total)} -> {format_bytes(now.peak_memory.total)}"
    told = f"{before.kind} {format_seconds(lost_seconds(was)[before.kind])} -> {format_seconds(lost_seconds(now)[before.kind])}"  # noqa: E501
    if lost_seconds(now)[before.kind] < lost_seconds(was)[before.kind]:
        return told
    gained = was.seconds - now.seconds
    return f"{format_seconds(gained)} of the step, though {told}"


def describe_cost(was: Estimate, now: Estimate) -> str:
    """Of a rung: seconds, bytes and waiting, each against the rung before."""
    told = [
        f"step {format_seconds(was.seconds)} -> {format_seconds(now.seconds)}",
        f"sent a rank {format_bytes(wire_bytes_per_step(was))} -> {format_bytes(wire_bytes_per_step(now))}",
    ]
    if now.phases.get("bubble", 0):
        told.append(f"bubble {format_percent(now.phases['bubble'] / now.seconds)}")
    return ", ".join(told)


def compare_with_plan(last: LadderStep, chosen: Estimate) -> str:
    """How the end of the ladder stands to the search's choice."""
    if Candidate.of(last.estimate.job) == Candidate.of(chosen.job):
        return "the last rung is the plan"
    gain = last.estimate.seconds - chosen.seconds
    less = last.estimate.peak_memory.total - chosen.peak_memory.total
    where = f"the search's plan is {describe_plan(chosen.job)}"
    if last.bottleneck.kind in ("batch", "memory"):
        return f"{where}: no rung alone removes what binds, {last.bottleneck.message}; together they do"
    if gain > 0:
        return (
            f"{where}: {format_seconds(gain)} ({format_percent(gain / last.estimate.seconds)}) quicker "
            f"than the last rung"
        )
    return f"{where}: as quick within a hundredth, {format_bytes(abs(less))} {'lighter' if less > 0 else 'heavier'}"
