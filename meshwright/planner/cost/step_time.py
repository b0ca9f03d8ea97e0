"""Step time by phase from the traces of all pipeline ranks: the slowest rank, and what it waits for the others.

Every rank runs its passes for every micro-batch. The slowest rank of a pipeline sets the pace, and the first and last
passes of the other ranks are the bubble. Inside a pass, communication that computation does not hide is exposed (see
`pass_time`).
"""

from __future__ import annotations

from meshwright.base.topology import schedule_orders, schedule_timeline
from meshwright.base.topology.schedules import find_schedule
from meshwright.planner.cost.comm_volume import trace_collectives
from meshwright.planner.cost.estimate import CollectiveCost, CollectiveCosts, Estimate, MemoryEstimate
from meshwright.planner.cost.peak_memory import rank_traces
from meshwright.planner.cost.step_flops import step_flops
from meshwright.planner.cost.trace.cost_trace import CostTrace
from meshwright.planner.cost.trace.operations import Compute
from meshwright.planner.cost.trace.pass_time import DATA_PARALLEL
from meshwright.planner.cost.trace.schedule_passes import rank_actions, schedule_passes, shortened
from meshwright.planner.cost.uncertainty import interval
from meshwright.planner.workload.planned_job import PlannedJob

MAX_ACTIONS = 1 << 13
"""The largest schedule (micro-batches times stages) that is executed action by action."""
NEARLY_FULL = 0.92
"""The fraction of a device's memory above which the caching allocator may have to retry."""


def busy_phases(trace: CostTrace) -> dict[str, float]:
    """Seconds of all passes of a step on a rank, by phase."""
    phases: dict[str, float] = {}
    for kind, count in trace.counts:
        for phase, seconds in trace.time(kind).phases.items():
            phases[phase] = phases.get(phase, 0.0) + count * seconds
    return phases


def bubble(job: PlannedJob, seconds: list[float]) -> float:
    """Seconds that the slowest rank waits for the first and last passes of the other ranks, in closed form, from the
    seconds of one micro-batch on every rank.
    """
    others = sum(seconds) - max(seconds)
    return others / find_schedule(job.schedule).bubble_divisor(job.stages_per_rank)


def executed_bubble(traces: list[CostTrace]) -> float | None:
    """The bubble of the schedule when it is executed pass by pass, with the seconds of each. Further rounds of a full
    pipeline add no bubble, so a few rounds stand for all. None for large schedules.
    """
    short = shortened(traces[0].schedule)
    stage_count = short.ranks * short.stages_per_rank
    if stage_count * short.micro_batches > MAX_ACTIONS:
        return None
    seconds: dict[schedule_orders.Action, float] = {}
    for rank, trace in enumerate(traces):
        passes = schedule_passes(short, rank, trace.resharding, trace.partly)
        kinds = [kind for kind in passes if kind.op != "R"]
        of_kind = {kind: trace.time(kind).dependent_seconds for kind in set(kinds)}
        seconds |= zip(rank_actions(short, rank), map(of_kind.__getitem__, kinds), strict=True)
    orders = schedule_orders.action_orders(*short)
    rows = schedule_timeline.execute_orders(orders, stage_count, seconds.__getitem__)
    busy = max(sum(slot.end - slot.start for slot in row) for row in rows)
    return float(max(row[-1].end for row in rows) - busy)


def add_bubble(
    job: PlannedJob, traces: list[CostTrace], dependent: list[float], phases: dict[str, float], simulate: bool
) -> None:
    """Adds the bubble, and the sends of the first and the last micro-batch, which nothing overlaps."""
    waited = executed_bubble(traces) if simulate else None
    if waited is None:
        waited = bubble(job, [seconds / job.batch.accumulation for seconds in dependent])
    send = traces[0].builders[0].messages.send()
    phases["bubble"] = waited + 2 * (len(traces) - 1) * min(send.seconds, send.hidden)


def estimate_step(
    job: PlannedJob,
    memory_by_rank: list[MemoryEstimate],
    simulate_pipeline: bool = False,
    traces: list[CostTrace] | None = None,
) -> Estimate:
    """`simulate_pipeline` executes the schedule instead of the closed form. `traces` are those of all pipeline ranks,
    if they exist already.
    """
    traces = traces or rank_traces(job)
    by_trace = {key: busy_phases(trace) for key, trace in {id(trace): trace for trace in traces}.items()}
    busy = [sum(by_trace[id(trace)].values()) for trace in traces]
    slow = traces[busy.index(max(busy))]
    phases = dict(by_trace[id(slow)])
    if len(traces) > 1:
        alone = {key: sum(each.get(phase, 0.0) for phase in DATA_PARALLEL) for key, each in by_trace.items()}
        dependent = [seconds - alone[id(trace)] for seconds, trace in zip(busy, traces, strict=True)]
        add_bubble(job, traces, dependent, phases, simulate_pipeline)
    ends = {id(trace): trace.end for trace in traces}.values()
    phases["update"] = max(operation.seconds for end in ends for operation in end if isinstance(operation, Compute))
    phases["other"] = job.trainer.fixed_step_seconds
    phases = {phase: seconds for phase, seconds in phases.items() if seconds > 0}
    flops = step_flops(job.model, job)
    nearly_full = any(memory.total > NEARLY_FULL * job.cluster.device.memory for memory in memory_by_rank)
    low, high, source = interval(job, phases, nearly_full)
    return Estimate(
        job,
        memory_by_rank,
        phases,
        CollectiveCosts(lambda: collective_costs(slow)),
        low,
        high,
        source,
        flops.model,
        flops.model + flops.recomputed,
        job.precision if 2 * flops.in_job_precision >= flops.model else "bf16",
    )


def collective_costs(trace: CostTrace) -> list[CollectiveCost]:
    """The collectives of a step, equal ones together."""
    exposed: dict[tuple[str, str, float], float] = {}
    for kind, count in trace.counts:
        for key, seconds in trace.time(kind).exposed.items():
            exposed[key] = exposed.get(key, 0.0) + count * seconds
    costs: dict[tuple[str, str, float], CollectiveCost] = {}
    for collective, times in trace_collectives(trace):
        key = collective.axis, collective.collective, collective.message_bytes
        known = costs.get(key)
        placement = collective.placement
        costs[key] = CollectiveCost(
            *key,
            times * collective.calls + (known.calls if known else 0),
            placement.ranks,
            placement.link,
            times * collective.seconds + (known.seconds if known else 0),
            exposed.get(key, 0.0),
        )
    return [cost for cost in costs.values() if cost.message_bytes]
