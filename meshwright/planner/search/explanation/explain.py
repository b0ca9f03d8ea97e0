"""The explanation of a plan in five parts: problem, mechanism, communication, tradeoff and measurement.

Every sentence is built from the figures of the estimate. Five questions follow, such as what breaks first at ten times
the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.base.io import format_bytes, format_count, format_percent, format_seconds
from meshwright.base.models.traced_model import TracedModel
from meshwright.planner.cost.comm_volume import CollectiveVolume, comm_volume, has_exact_volume
from meshwright.planner.cost.estimate import CollectiveCost, Estimate
from meshwright.planner.describe import (
    describe_plan,
    exposed_seconds,
    merged_calls,
    phase_label,
    recompute_seconds,
    sync_seconds,
    wire_bytes_per_step,
)
from meshwright.planner.search.choice import complexity, memory_risk
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explanation.ladder import Bottleneck, find_bottleneck
from meshwright.planner.search.explanation.mechanism import mechanism, replicated, sharded
from meshwright.planner.search.scaling import scaled_estimate
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload import count_samples

SCALE_FACTOR = 10
"""The multiple of the devices at which the explanation says what breaks first."""


@dataclass(frozen=True)
class Explanation:
    problem: list[str]
    mechanism: list[str]
    communication: list[str]
    tradeoff: list[str]
    measurement: list[str]
    questions: dict[str, str]
    """Answers by question: what is replicated, what is sharded, which collective is on the critical path, how the
    optimizer's semantics are preserved, and what breaks first at ten times the size.
    """


def explain(
    plan: Estimate,
    others: Sequence[Estimate] = (),
    ddp: tuple[Estimate, Bottleneck] | None = None,
    cache: CostCache | None = None,
    file: str = "PLAN.toml",
) -> Explanation:
    """Explains a plan or a run.

    `others` are the next best plans, `ddp` is the plan of plain DDP with its bottleneck, `cache` is needed to estimate
    the plan on more devices, and `file` is the name of the plan file.
    """
    questions = {
        "What is replicated?": replicated(plan),
        "What is sharded?": sharded(plan),
        "Which collective is on the critical path?": critical_collective(plan),
        "How are the optimizer's semantics preserved?": optimizer_semantics(plan.job),
    }
    if cache is not None:
        questions[f"What breaks first at {SCALE_FACTOR}x?"] = " ".join(scaling_limits(plan, cache))
    return Explanation(
        problem(plan, ddp),
        mechanism(plan),
        communication(plan),
        tradeoff(plan, [other for other in others if other is not plan][:2]),
        measurement(plan, file),
        questions,
    )


def problem(plan: Estimate, ddp: tuple[Estimate, Bottleneck] | None) -> list[str]:
    job = plan.job
    sentences = [
        f"{format_count(job.model.parameters)} parameters, {count_samples(job.batch.global_)} of {job.sequence:,} "
        f"tokens per step, {job.layout.ranks:,} {job.cluster.device.name} with "
        f"{format_bytes(job.cluster.device.memory)} each."
    ]
    if ddp is not None:
        estimate, bottleneck = ddp
        sentences.append(
            f"DDP takes {format_seconds(estimate.seconds)} per step and has no bottleneck."
            if bottleneck.kind == "none"
            else f"The bottleneck of DDP is {bottleneck.message}."
        )
    remaining = find_bottleneck(plan)
    has_none = f"This plan has no bottleneck: {remaining.message.removeprefix('none: ')}."
    sentences.append(has_none if remaining.kind == "none" else f"The bottleneck of this plan is {remaining.message}.")
    return sentences


def communication(plan: Estimate) -> list[str]:
    """Describes the collectives, those with the most exposed time first."""
    calls = sorted(merged_calls(plan), key=lambda call: (-call.exposed_seconds, -call.seconds))
    if not calls:
        return ["A rank sends 0 B per step: no axis communicates."]
    exposed = exposed_seconds(plan)
    summary = (
        f"A rank sends {format_bytes(wire_bytes_per_step(plan))} per step. Collectives take "
        f"{format_seconds(sum(call.seconds for call in calls))}, of which {format_seconds(exposed)} "
        f"({format_percent(exposed / plan.seconds)} of the step) are exposed."
    )
    return [summary, *(f"{describe_call(call)}." for call in calls)]


def describe_call(call: CollectiveCost) -> str:
    where = "inside a node" if call.link == "intra-node" else "between nodes"
    if call.seconds <= call.exposed_seconds:
        overlap = f"exposed, {format_seconds(call.exposed_seconds)}"
    elif call.exposed_seconds <= 0:
        overlap = f"overlapped with compute, {format_seconds(call.seconds)}"
    else:
        overlap = f"{format_seconds(call.exposed_seconds)} of {format_seconds(call.seconds)} exposed"
    volume = f"{call.calls:,.0f} x {format_bytes(call.message_bytes)}"
    return f"{call.axis} {call.collective}: {volume} over {call.ranks:,} ranks {where}: {overlap}"


def tradeoff(plan: Estimate, others: Sequence[Estimate]) -> list[str]:
    capacity = plan.job.cluster.device.memory
    low, high = format_seconds(plan.interval_low), format_seconds(plan.interval_high)
    summary = (
        f"A step takes {format_seconds(plan.seconds)} (80% interval {low} to {high}; largest source of uncertainty: "
        f"{plan.main_uncertainty}). MFU is {plan.mfu:.1%}, and {format_bytes(capacity - plan.peak_memory.total)} of "
        f"{format_bytes(capacity)} per device stay free."
    )
    costs = {
        "pipeline bubble": plan.phases.get("bubble", 0.0),
        "recomputation": recompute_seconds(plan),
        "exposed communication": exposed_seconds(plan),
    }
    lost = [
        f"{name} {format_seconds(spent)} ({format_percent(spent / plan.seconds)})"
        for name, spent in costs.items()
        if spent > 0
    ]
    overhead = f"Overhead per step: {', '.join(lost)}." if lost else "Overhead per step: 0 s."
    return [summary, overhead, *(compare_plans(plan, other) for other in others)]


def compare_plans(plan: Estimate, other: Estimate) -> str:
    """Says why the other plan was not chosen: a faster one is more complex, or has a larger risk of not fitting."""
    if complexity(other) > complexity(plan):
        if_faster = ", but more complex"
    elif (risk := memory_risk(other)) > memory_risk(plan):
        if_faster = f", but with a risk of {format_percent(risk)} that it does not fit"
    else:
        if_faster = ""
    return f"Rejected: {describe_difference(plan, other, if_faster)}."


def describe_difference(plan: Estimate, other: Estimate, if_faster: str = "") -> str:
    """Says what the other plan costs compared with this one; `if_faster` is added if it is faster."""
    slower = other.seconds - plan.seconds
    more_memory = other.peak_memory.total - plan.peak_memory.total
    names = {*plan.phases, *other.phases}
    growth = {name: other.phases.get(name, 0.0) - plan.phases.get(name, 0.0) for name in names}
    phase, by = max(growth.items(), key=lambda row: row[1])
    tied = abs(slower) < 1e-3 * plan.seconds
    if tied:
        speed = "as fast"
    elif slower > 0:
        speed = f"{format_seconds(slower)} slower"
    else:
        speed = f"{format_seconds(-slower)} faster{if_faster}"
    memory = f"{format_bytes(abs(more_memory))} {'more' if more_memory > 0 else 'less'} memory"
    because = f": {phase_label(phase)} takes {format_seconds(by)} more" if by > 0 and slower > 0 and not tied else ""
    return f"{describe_plan(other.job)}: {speed}, {memory}{because}"


def measurement(plan: Estimate, file: str) -> list[str]:
    memory, calls = plan.peak_memory, merged_calls(plan)
    low, high = format_seconds(plan.interval_low), format_seconds(plan.interval_high)
    if plan.job.run_config is not None:
        first = (
            f"Write the plan with --out {file}, run meshwright train {file} --steps 20 --run DIR, then "
            "meshwright report DIR. The prediction is wrong if"
        )
    else:
        first = "Train 20 steps. The prediction is wrong if"
    where = f" on pipeline rank {peak_stage(plan)}" if plan.job.layout.pipeline > 1 else ""
    sentences = [
        first,
        f"the median step time from the third step on is outside {low} to {high};",
        f"phases.sync is far from {format_seconds(sync_seconds(plan))}, the exposed time outside forward and backward;",
        f"reserved memory, without the device context, exceeds {format_bytes(memory.reserved)}{where};",
    ]
    if (row := largest_transfer(plan)) is not None:
        sentences.append(
            f"the counters of rank 0 do not show exactly {row.message_bytes:,} bytes of {row.axis} {row.collective}."
        )
    elif calls:
        call = max(calls, key=lambda each: each.message_bytes * each.calls)
        total = format_bytes(call.message_bytes * call.calls)
        sentences.append(f"{call.axis} {call.collective} does not move {total} per step.")
    return sentences


def largest_transfer(plan: Estimate) -> CollectiveVolume | None:
    """Returns the collective with which rank 0 moves the most bytes, exactly; None without a run configuration."""
    return max(exact_traffic(plan), key=lambda row: row.message_bytes, default=None)


def exact_traffic(plan: Estimate) -> list[CollectiveVolume]:
    """Returns what rank 0 sends in a step, exactly, by axis and collective; empty without a run configuration."""
    job = plan.job
    if job.run_config is None:
        return []
    if isinstance(job.model, TracedModel):
        exact = has_exact_volume(job.layout)
        return comm_volume(job.run_config, job.layout, job.batch, traced=job.model) if exact else []
    return comm_volume(job.run_config, job.layout, job.batch)


def peak_stage(plan: Estimate) -> int:
    return plan.peak_memory.rank


def critical_collective(plan: Estimate) -> str:
    exposed = [call for call in merged_calls(plan) if call.exposed_seconds > 0]
    if not exposed:
        return "None: all communication overlaps with compute."
    call = max(exposed, key=lambda each: each.exposed_seconds)
    return (
        f"{call.axis} {call.collective}: {format_seconds(call.exposed_seconds)} of the step's "
        f"{format_seconds(plan.seconds)} ({format_percent(call.exposed_seconds / plan.seconds)})."
    )


def optimizer_semantics(job: PlannedJob) -> str:
    batch = job.batch
    summed = (
        f"Gradients of all {count_samples(batch.global_)} (micro-batch {batch.micro} x accumulation "
        f"{batch.accumulation} x {data_ranks(batch.replicas)}) are summed before the optimizer step"
    )
    if job.sharding == "none":
        return f"{summed}, which every replica computes identically."
    ranks = job.layout.shard * job.layout.context
    return f"{summed}; each of {ranks:,} ranks updates its local shard, and parameters are all-gathered."


def scaling_limits(plan: Estimate, cache: CostCache) -> list[str]:
    """Describes the plan on ten times the devices: with the same batch, and with ten times the batch."""
    job = plan.job
    sentences = []
    for weak in (False, True):
        factor = SCALE_FACTOR if weak else max_data_parallel_factor(job, SCALE_FACTOR)
        if factor < SCALE_FACTOR:
            sentences.append(
                f"The batch: {count_samples(job.batch.global_)} cannot be divided over "
                f"{data_ranks(job.batch.replicas * SCALE_FACTOR)}; {factor}x is the limit."
            )
        if factor == 1:
            continue
        batch = f"With {SCALE_FACTOR}x the batch" if weak else "With the same batch"
        devices = f"on {job.layout.ranks * factor:,} devices"
        scaled, same_layout = scaled_estimate(cache, plan, factor, weak)
        if scaled is None:
            sentences.append(f"{batch} {devices}, nothing fits.")
            continue
        ideal = plan.seconds if weak else plan.seconds / factor
        phase, by = fastest_growing_phase(plan, scaled, ideal / plan.seconds)
        layout = "" if same_layout else f" (with {describe_plan(scaled.job)})"
        sentences.append(
            f"{batch} {devices}, a step takes {format_seconds(scaled.seconds)}{layout}; ideal is "
            f"{format_seconds(ideal)} ({format_percent(ideal / scaled.seconds)} efficiency). The phase that grows most "
            f"is {phase_label(phase)}, by {format_seconds(by)}."
        )
    return sentences


def fastest_growing_phase(before: Estimate, after: Estimate, ideal: float) -> tuple[str, float]:
    """Returns the phase that exceeds its ideal share of the time before the most, and by how many seconds."""
    growth = {phase: spent - before.phases.get(phase, 0.0) * ideal for phase, spent in after.phases.items()}
    return max(growth.items(), key=lambda row: row[1])


def max_data_parallel_factor(job: PlannedJob, limit: int) -> int:
    """Returns the largest factor up to `limit` by which the batch allows more data-parallel ranks."""
    return max(factor for factor in range(1, limit + 1) if job.batch.global_ % (job.batch.replicas * factor) == 0)


def data_ranks(number: int) -> str:
    return f"{number:,} data-parallel rank{'s' if number > 1 else ''}"
