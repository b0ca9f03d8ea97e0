"""Communication volume of one rank in one optimizer step, by axis and collective: the collectives of its trace.

Message bytes are those of full tensors; wire bytes follow from the ring algorithm. For a Meshwright run both are exact,
and `prove` compares them with what a real step counts. P is the bytes of a rank's parameters once they are unsharded,
padded if rows do not divide; M is the number of micro-steps, n the ranks of the axis. Context-parallel ranks belong to
the shard group (shard+context), or to the replicas if nothing is sharded (replicate+context). Weights of experts that
are divided over ranks are reduced over smaller groups (expert_shard, expert_replicate) by the same rules.

| layout | message bytes |
|---|---|
| replicate (DDP) | all-reduce P |
| shard optimizer | all-gather P, reduce-scatter P |
| shard gradients | all-gather P, reduce-scatter M P |
| shard parameters | all-gather 2 M P, reduce-scatter M P |
| pipeline | reduce-scatter P; all-gather P, and with sharded parameters as often as the schedule unshards |
| replicas of shards | all-reduce P / n over the replicas |
| tensor | all-reduce of the gradients of norms, routers and experts, whenever gradients are reduced |
| activations | see `activation_messages` |
| optimizers that need whole matrices | see `optimizer_messages` |

With the ring algorithm an all-reduce sends twice its message. With M = 1, DDP and sharding of the optimizer or of the
gradients therefore send 2 P (n - 1) / n, and sharding of the parameters 3 P (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.base.config import Batch, RunConfig
from meshwright.base.hardware.cluster import UNKNOWN_HOST
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.collectives import wire_bytes
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.peak_memory import activation_settings
from meshwright.planner.cost.trace.cost_trace import CostTrace
from meshwright.planner.cost.trace.operations import Communicate, collectives
from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True, order=True)
class CollectiveVolume:
    """The bytes of one collective on one axis in one step."""

    axis: str
    collective: str
    message_bytes: int
    wire_bytes: int


def comm_volume(
    config: RunConfig, layout: Layout, batch: Batch, rank: int = 0, traced: TracedModel | None = None
) -> list[CollectiveVolume]:
    """The volume of one rank of a Meshwright run, for the model of the config, or for a user's model. Ranks differ by
    their pipeline stages, and by the load of their experts (see `activation_messages`).
    """
    job = PlannedJob.of_run(config, layout, batch, UNKNOWN_HOST, traced=traced)
    return trace_volume(run_trace(job, rank))


def has_exact_volume(layout: Layout) -> bool:
    """Whether the volume of a user's model is known: that of the other axes depends on its operators, and `simulate`
    counts it.
    """
    return set(layout.active_axes) <= {"replicate", "shard"}


def run_trace(job: PlannedJob, rank: int) -> CostTrace:
    """The trace of a global rank of a Meshwright run."""
    trace = CostTrace(job, activation_settings(job), job.layout.coordinates(rank)["pipeline"])
    trace.rank = rank
    return trace


def trace_volume(trace: CostTrace) -> list[CollectiveVolume]:
    messages: Counter[tuple[str, str, int]] = Counter()
    for collective, calls in trace_collectives(trace):
        key = collective.axis, collective.collective, group_size(collective, trace.job)
        messages[key] += round(calls * collective.calls * collective.message_bytes)
    rows = [
        CollectiveVolume(axis, collective, message, wire_bytes(collective, message, ranks))
        for (axis, collective, ranks), message in messages.items()
        if message
    ]
    return sorted(rows)


def group_size(collective: Communicate, job: PlannedJob) -> int:
    """The ranks of the group. A send goes to one rank; its axis has as many as the layout."""
    if collective.collective == "send":
        return int(getattr(job.layout, collective.axis))
    return collective.placement.ranks


def trace_collectives(trace: CostTrace) -> Iterator[tuple[Communicate, float]]:
    """Every collective of the step, and how often it runs."""
    yield from collectives(trace.begin)
    for kind, count in trace.counts:
        yield from collectives(trace.operations(kind), count)
    yield from collectives(trace.end)
