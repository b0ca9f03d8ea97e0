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
from meshwright.planner.search.candidates import RECOMPUTED, Space
from meshwright.planner.search.choice import Choice
from meshwright.planner.search.search import CostCache, lightest, search
from meshwright.planner.wording import classes, lost, plan, real_calls, sent

ADDED = ("recompute", "shard", "tensor", "context", "pipeline", "expert")
"""What a rung may add, the least trouble first."""
WORTH = 0.10
"""Time that is lost to one thing binds from this share of a step on."""
WEIGHED = 40
"""plans of a rung, after one of every frame"""
GAIN = 0.02
"""A rung that is added for speed has to gain so much."""


@dataclass(frozen=True)
class Binding:
    """What stands in the way of a plan."""

    kind: str
    """batch, memory, communication, recomputation, bubble or nothing"""
    over: float
    """devices without a sample, bytes too many, or seconds lost"""
    told: str


@dataclass(frozen=True)
class Rung:
    name: str
    estimate: Estimate
    binding: Binding
    fixed: str
    """what of the rung before it removed"""
    cost: str
    """and at what price"""
    tried: tuple[str, ...] = ()
    """what was not added, and why"""


def ladder(desk: CostCache, chosen: Estimate) -> tuple[list[Rung], str]:
    """(the rungs, how the last of them stands to the plan that the search chose)."""
    used: tuple[str, ...] = ()
    estimate, binding = stand(desk, used)
    rungs = [Rung("DDP" + (", pins kept" if desk.work.pinned else ""), estimate, binding, "", "")]
    while binding.kind != "nothing" and (step := climb(desk, used, rungs[-1])) is not None:
        added, estimate, binding, tried = step
        used = (*used, added)
        before = rungs[-1]
        told = fixed(before.binding, binding, before.estimate, estimate)
        rungs.append(Rung(f"+ {added}", estimate, binding, told, cost(before.estimate, estimate), tried))
    return rungs, compared(rungs[-1], chosen)


def space_of(desk: CostCache, used: tuple[str, ...]) -> Space:
    """Tensor groups stay inside a node."""
    recompute = RECOMPUTED if "recompute" in used else RECOMPUTED[:1]
    return Space(frozenset(used) - {"recompute"}, recompute, desk.cluster.devices_per_node)


def stand(desk: CostCache, used: tuple[str, ...]) -> tuple[Estimate, Binding]:
    """The best that there is with what was added so far: on fewer devices where the batch does not reach for all, and
    the lightest where nothing fits.
    """
    desk, idle = reaching(desk, space_of(desk, used))
    found = search(desk, space_of(desk, used), top=1, most=WEIGHED).ranked
    if found:
        return found[0], bound_by(found[0], idle)
    least = lightest(desk, space_of(desk, used))
    assert least is not None  # one rank with one sample is always there
    return desk.time(least), bound_by(desk.time(least), idle)


def reaching(desk: CostCache, space: Space) -> tuple[CostCache, int]:
    """The devices that have work, and how many have none."""
    whole = desk.cluster.device_count
    if lightest(desk, space) is not None:
        return desk, 0
    for devices in sorted(
        {n for n in range(1, min(whole, desk.work.global_batch * 64) + 1) if whole % n == 0}
        | {n for n in range(1, min(whole, desk.work.global_batch) + 1) if desk.work.global_batch % n == 0},
        reverse=True,
    ):
        fewer = CostCache(desk.work, desk.cluster.with_devices(devices))
        if lightest(fewer, space) is not None:
            return fewer, whole - devices
    return CostCache(replace(desk.work, pinned={}), desk.cluster.with_devices(1)), whole - 1


def bound_by(estimate: Estimate, idle: int = 0) -> Binding:
    """The first of batch, memory and communication that binds."""
    job, held = estimate.job, estimate.peak_memory
    if idle:
        ranks = f"{job.layout.data_degree:,} data-parallel rank{'s' if job.layout.data_degree > 1 else ''}"
        told = f"a batch of {job.batch.global_:,} divides over {ranks}, and {idle:,} devices have no sample"
        return Binding("batch", idle, told)
    capacity = job.cluster.device.memory
    if held.total > capacity:
        name, most = max(classes(held).items(), key=lambda row: row[1])
        over = held.total - capacity
        told = (
            f"{format_bytes(held.total)} of {format_bytes(capacity)}, {format_bytes(over)} over; {name} "
            f"alone {format_bytes(most)}"
        )
        return Binding("memory", over, told)
    kind, most = max(lost(estimate).items(), key=lambda row: row[1])
    if most <= WORTH * estimate.seconds:
        told = (
            f"nothing: {format_percent(held.total / capacity)} of memory, "
            f"{format_percent(most / estimate.seconds)} lost to {kind}"
        )
        return Binding("nothing", 0, told)
    told = f"{kind} takes {format_seconds(most)}, {format_percent(most / estimate.seconds)} of the step"
    if kind == "communication":
        call = max(real_calls(estimate), key=lambda one: one.exposed_seconds)
        told += f"; most: {call.axis} {call.collective} {format_seconds(call.exposed_seconds)}"
    return Binding(kind, most, told)


def climb(
    desk: CostCache, used: tuple[str, ...], before: Rung
) -> tuple[str, Estimate, Binding, tuple[str, ...]] | None:
    """The first that removes what binds; else the first that lessens it to twice what the best would leave, or less."""
    tried: list[str] = []
    better: list[tuple[float, str, Estimate, Binding]] = []
    for added in ADDED:
        if added in used or (added == "expert" and not desk.work.model.experts) or not helps(added, before.binding):
            continue
        estimate, binding = stand(desk, (*used, added))
        if removes(before, estimate, binding):
            return added, estimate, binding, tuple(tried)
        if lessens(before.binding, binding):
            better.append((binding.over, added, estimate, binding))
        tried.append(f"{added}: {binding.told}")
    if not better:
        return None
    enough = 2 * min(row[0] for row in better)
    _, added, estimate, binding = next(row for row in better if row[0] <= enough)
    rest = tuple(told for told in tried if not told.startswith(f"{added}: "))
    return added, estimate, binding, rest


def helps(added: str, binding: Binding) -> bool:
    """Copies and shards need samples; recomputation takes time."""
    return added not in {"batch": ("recompute", "shard", "expert"), "memory": ()}.get(binding.kind, ("recompute",))


def removes(before: Rung, estimate: Estimate, binding: Binding) -> bool:
    """Where time is lost there has to be a gain, and it has to be worth a rung."""
    if rank_of(before.binding) == 2:
        return rank_of(binding) >= 2 and estimate.seconds < (1 - GAIN) * before.estimate.seconds
    return rank_of(binding) > rank_of(before.binding)


def rank_of(binding: Binding) -> int:
    """Of what binds: first the batch, then memory, then time."""
    return {"batch": 0, "memory": 1, "nothing": 3}.get(binding.kind, 2)


def lessens(before: Binding, binding: Binding) -> bool:
    return before.kind in ("batch", "memory") and binding.kind == before.kind and binding.over < 0.99 * before.over


def fixed(before: Binding, after: Binding, was: Estimate, now: Estimate) -> str:
    if before.kind == "batch":
        return f"devices without a sample {before.over:,.0f} -> {after.over if after.kind == 'batch' else 0:,.0f}"
    if before.kind == "memory":
        return f"heaviest rank {format_bytes(was.peak_memory.total)} -> {format_bytes(now.peak_memory.total)}"
    told = f"{before.kind} {format_seconds(lost(was)[before.kind])} -> {format_seconds(lost(now)[before.kind])}"
    if lost(now)[before.kind] < lost(was)[before.kind]:
        return told
    gained = was.seconds - now.seconds
    return f"{format_seconds(gained)} of the step, though {told}"


def cost(was: Estimate, now: Estimate) -> str:
    """Of a rung: seconds, bytes and waiting, each against the rung before."""
    told = [
        f"step {format_seconds(was.seconds)} -> {format_seconds(now.seconds)}",
        f"sent a rank {format_bytes(sent(was))} -> {format_bytes(sent(now))}",
    ]
    if now.phases.get("bubble", 0):
        told.append(f"bubble {format_percent(now.phases['bubble'] / now.seconds)}")
    return ", ".join(told)


def compared(last: Rung, chosen: Estimate) -> str:
    """How the end of the ladder stands to the search's choice."""
    if Choice.of(last.estimate.job) == Choice.of(chosen.job):
        return "the last rung is the plan"
    gain = last.estimate.seconds - chosen.seconds
    less = last.estimate.peak_memory.total - chosen.peak_memory.total
    where = f"the search's plan is {plan(chosen.job)}"
    if last.binding.kind in ("batch", "memory"):
        return f"{where}: no rung alone removes what binds, {last.binding.told}; together they do"
    if gain > 0:
        return (
            f"{where}: {format_seconds(gain)} ({format_percent(gain / last.estimate.seconds)}) quicker "
            f"than the last rung"
        )
    return f"{where}: as quick within a hundredth, {format_bytes(abs(less))} {'lighter' if less > 0 else 'heavier'}"
