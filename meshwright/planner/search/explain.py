"""Why a plan: problem, mechanism, communication, tradeoff and measurement, and what breaks at ten times the size.

Every sentence is made of the estimate's own figures. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.io import format_bytes, format_count, format_percent, format_seconds
from meshwright.planner.cost.estimate import CollectiveCost, Estimate
from meshwright.planner.describe import (
    describe_plan,
    exposed_seconds,
    merged_calls,
    recompute_seconds,
    sync_seconds,
    wire_bytes_per_step,
)
from meshwright.planner.exact.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.search.ladder import Bottleneck, find_bottleneck
from meshwright.planner.search.mechanism import mechanism, replicated, sharded
from meshwright.planner.search.scaling import scaled_estimate
from meshwright.planner.search.search import CostCache
from meshwright.planner.workload.planned_job import PlannedJob

TENFOLD = 10


@dataclass(frozen=True)
class Explanation:
    problem: list[str]
    mechanism: list[str]
    communication: list[str]
    tradeoff: list[str]
    measurement: list[str]
    questions: dict[str, str]
    """what is replicated, what is sharded, which collective is on the critical path, how the optimizer stays the same,
    and what breaks first at ten times the size
    """


def explain(
    estimate: Estimate,
    others: Sequence[Estimate] = (),
    plain: tuple[Estimate, Bottleneck] | None = None,
    desk: CostCache | None = None,
    file: str = "PLAN.toml",
) -> Explanation:
    """Of a plan or a run. `others` are the next best; `plain` is DDP and what binds it; `desk` can ask for more."""
    rest = [other for other in others if other is not estimate][:2]
    return Explanation(
        problem(estimate, plain),
        mechanism(estimate),
        communication(estimate),
        tradeoff(estimate, rest),
        measurement(estimate, file),
        {
            "What is replicated?": replicated(estimate),
            "What is sharded?": sharded(estimate),
            "Which collective is on the critical path?": critical_collective(estimate),
            "How do the optimizer's semantics stay consistent?": optimizer_semantics(estimate.job),
            **(
                {f"What breaks first at {TENFOLD}x?": " ".join(scaling_limits(estimate, desk))}
                if desk is not None
                else {}
            ),
        },
    )


def problem(estimate: Estimate, plain: tuple[Estimate, Bottleneck] | None) -> list[str]:
    job = estimate.job
    told = [
        f"{format_count(job.model.parameters)} parameters, {job.batch.global_:,} samples of "
        f"{job.sequence:,} tokens a step, "
        f"{job.layout.ranks:,} {job.cluster.device.name} of {format_bytes(job.cluster.device.memory)}."
    ]
    if plain is not None:
        first, binding = plain
        told.append(
            f"Whole copies (DDP) take {format_seconds(first.seconds)} a step, and nothing binds them."
            if binding.kind == "nothing"
            else f"Whole copies (DDP) are bound by {bottleneck_name(binding)}: {binding.message}."
        )
    now = find_bottleneck(estimate)
    told.append(
        f"{now.message.replace('nothing:', 'Nothing binds this plan:')}."
        if now.kind == "nothing"
        else f"What binds this plan: {now.message}."
    )
    return told


def bottleneck_name(binding: Bottleneck) -> str:
    return {"batch": "the batch", "bubble": "the pipeline's bubble"}.get(binding.kind, binding.kind)


def communication(estimate: Estimate) -> list[str]:
    """The collectives, those that are waited for longest first."""
    calls = sorted(merged_calls(estimate), key=lambda call: (-call.exposed_seconds, -call.seconds))
    if not calls:
        return ["A rank sends 0 B a step: no axis has messages."]
    waited = exposed_seconds(estimate)
    told = [
        f"A rank sends {format_bytes(wire_bytes_per_step(estimate))} a step; messages take "
        f"{format_seconds(sum(call.seconds for call in calls))}, "
        f"of which {format_seconds(waited)} ({format_percent(waited / estimate.seconds)} of the step) are exposed."
    ]
    return told + [f"{describe_call(call)}." for call in calls]


def describe_call(call: CollectiveCost) -> str:
    where = "inside a node" if call.link == "intra-node" else "between nodes"
    hidden = call.seconds - call.exposed_seconds
    how = (
        f"exposed, {format_seconds(call.exposed_seconds)}"
        if hidden <= 0
        else f"hidden, {format_seconds(call.seconds)}"
        if call.exposed_seconds <= 0
        else f"{format_seconds(call.exposed_seconds)} of {format_seconds(call.seconds)} exposed"
    )
    times = f"{call.calls:,.0f} x {format_bytes(call.message_bytes)}"
    return f"{call.axis} {call.collective}: {times} over {call.ranks:,} ranks {where}: {how}"


def tradeoff(estimate: Estimate, others: Sequence[Estimate]) -> list[str]:
    job, held = estimate.job, estimate.peak_memory
    left = job.cluster.device.memory - held.total
    told = [
        f"It takes {format_seconds(estimate.seconds)} a step ({format_seconds(estimate.interval_low)} to "
        f"{format_seconds(estimate.interval_high)} in four "
        f"cases of five; most of the doubt: {estimate.main_uncertainty}), {estimate.mfu:.1%} of the devices' peak, "
        f"and leaves {format_bytes(left)} of {format_bytes(job.cluster.device.memory)} free."
    ]
    costs = {
        "waiting in the pipeline": estimate.phases.get("bubble", 0.0),
        "computing again": recompute_seconds(estimate),
    }
    costs["exposed messages"] = exposed_seconds(estimate)
    paid = [
        f"{name} {format_seconds(spent)} ({format_percent(spent / estimate.seconds)})"
        for name, spent in costs.items()
        if spent > 0
    ]
    told.append(f"Its price a step: {', '.join(paid)}." if paid else "Nothing of a step is lost.")
    return told + [why_not(estimate, other) for other in others]


def why_not(estimate: Estimate, other: Estimate) -> str:
    """What speaks against the next best."""
    slower = other.seconds - estimate.seconds
    heavier = other.peak_memory.total - estimate.peak_memory.total
    names = {*estimate.phases, *other.phases}
    grown = {name: other.phases.get(name, 0.0) - estimate.phases.get(name, 0.0) for name in names}
    term, by = max(grown.items(), key=lambda row: row[1])
    alike = abs(slower) < 1e-3 * estimate.seconds
    pace = (
        "as quick"
        if alike
        else f"{format_seconds(abs(slower))} {'slower' if slower > 0 else 'quicker, and of more parts'}"
    )
    weight = f"{format_bytes(abs(heavier))} {'heavier' if heavier > 0 else 'lighter'}"
    because = f": {term} takes {format_seconds(by)} more" if by > 0 and slower > 0 and not alike else ""
    return f"Not {describe_plan(other.job)}: {pace}, {weight}{because}."


def measurement(estimate: Estimate, file: str) -> list[str]:
    held, calls = estimate.peak_memory, merged_calls(estimate)
    told = []
    if estimate.job.run_config is not None:
        told.append(
            f"Run: meshwright train {file} --steps 20. The plan is wrong where step records from the third on say:"
        )
    else:
        told.append("Train 20 steps of it. The plan is wrong where they say:")
    told.append(
        f"seconds outside {format_seconds(estimate.interval_low)} to {format_seconds(estimate.interval_high)} "
        "(median of the steps);"
    )
    told.append(
        f"phases.sync far from {format_seconds(sync_seconds(estimate))}, the waiting that is not inside passes;"
    )
    told.append(
        f"memory over {format_bytes(held.reserved)} on the heaviest rank (rank of the pipeline: {peak_stage(estimate)});"  # noqa: E501
    )
    if (row := largest_transfer(estimate)) is not None:
        told.append(
            f"ledger.traffic of rank 0 with other than {row.message_bytes:,} bytes of {row.axis} {row.collective}."
        )
    elif calls:
        call = max(calls, key=lambda one: one.message_bytes * one.calls)
        told.append(
            f"other than {format_bytes(call.message_bytes * call.calls)} of {call.axis} {call.collective} a step."
        )
    return told


def largest_transfer(estimate: Estimate) -> CollectiveVolume | None:
    """Of what rank 0 sends, the row with most bytes, exact; of our own runs."""
    job = estimate.job
    if job.run_config is None:
        return None
    rows = comm_volume(job.run_config, job.layout, job.batch)
    return max(rows, key=lambda row: row.message_bytes, default=None)


def peak_stage(estimate: Estimate) -> int:
    return estimate.memory_by_rank.index(estimate.peak_memory)


def critical_collective(estimate: Estimate) -> str:
    waiting = [call for call in merged_calls(estimate) if call.exposed_seconds > 0]
    if not waiting:
        return "None: nothing that is sent is waited for."
    call = max(waiting, key=lambda one: one.exposed_seconds)
    return (
        f"{call.axis} {call.collective}: {format_seconds(call.exposed_seconds)} of the step's "
        f"{format_seconds(estimate.seconds)} "
        f"({format_percent(call.exposed_seconds / estimate.seconds)})."
    )


def optimizer_semantics(job: PlannedJob) -> str:
    batch = job.batch
    told = (
        f"Gradients of all {batch.global_:,} samples ({batch.micro} a pass x {batch.accumulation} passes x "
        f"{data_ranks(batch.replicas)}) are summed before one update"
    )
    if job.sharding == "none":
        return f"{told}, which every copy makes alike."
    return (
        f"{told}; each of {job.layout.shard * job.layout.context:,} ranks updates its own part, and parts are gathered."
    )


def scaling_limits(estimate: Estimate, desk: CostCache) -> list[str]:
    """At ten times the devices: with the same batch, and with ten times the batch."""
    job, told = estimate.job, []
    for growing in (False, True):
        factor = TENFOLD if growing else max_data_parallel_factor(job, TENFOLD)
        if factor < TENFOLD:
            told.append(
                f"The batch: {job.batch.global_:,} samples do not divide over "
                f"{data_ranks(job.batch.replicas * TENFOLD)}; {factor}x is as far as they do."
            )
        if factor == 1:
            continue
        name = f"With {TENFOLD}x the batch" if growing else "With the same batch"
        devices = f"on {job.layout.ranks * factor:,} devices"
        more, kept = scaled_estimate(desk, estimate, factor, growing)
        if more is None:
            told.append(f"{name} nothing fits {devices}.")
            continue
        ideal = estimate.seconds if growing else estimate.seconds / factor
        term, by = grows_most(estimate, more, ideal / estimate.seconds)
        shape = "" if kept else f" (by {describe_plan(more.job)})"
        told.append(
            f"{name} {devices} a step takes {format_seconds(more.seconds)}{shape}, where "
            f"{format_seconds(ideal)} would be ideal "
            f"({format_percent(ideal / more.seconds)}); {term} grows most, {format_seconds(by)} beyond its share."
        )
    return told


def grows_most(before: Estimate, after: Estimate, ideal: float) -> tuple[str, float]:
    """The phase that takes most beyond its ideal share of what it took, and by how much."""
    grown = {phase: spent - before.phases.get(phase, 0.0) * ideal for phase, spent in after.phases.items()}
    return max(grown.items(), key=lambda row: row[1])


def max_data_parallel_factor(job: PlannedJob, most: int) -> int:
    """Times as many data-parallel ranks as the batch has samples for, at most so many."""
    return max(factor for factor in range(1, most + 1) if job.batch.global_ % (job.batch.replicas * factor) == 0)


def data_ranks(number: int) -> str:
    return f"{number:,} data-parallel rank{'s' if number > 1 else ''}"
