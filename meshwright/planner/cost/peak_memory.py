"""Peak memory of each pipeline rank of a job by class, and the peak of its state: the allocations of its trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import add, mul

from meshwright.base.config import Batch, RunConfig
from meshwright.base.hardware.cluster import UNKNOWN_HOST
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.terms.activations import ActivationSettings
from meshwright.planner.cost.trace.cost_trace import CostTrace
from meshwright.planner.cost.trace.operations import GRADIENTS, OPTIMIZER
from meshwright.planner.cost.trace.pass_memory import Bytes, MemoryWalk, PassMemory
from meshwright.planner.cost.trace.schedule_passes import peak_points
from meshwright.planner.cost.units.data_sharding import data_sharding
from meshwright.planner.cost.units.stage_parameters import StageLayers, stages_by_rank
from meshwright.planner.workload.planned_job import PlannedJob


def estimate_memory(
    job: PlannedJob, quick: bool = False, traces: list[CostTrace] | None = None
) -> list[MemoryEstimate]:
    """Returns the estimate of every pipeline rank; with `quick`, only of ranks that may have the largest peak. `traces`
    are those of all pipeline ranks, if they exist already.
    """
    traces = traces or rank_traces(job)
    ranks = ranks_that_may_peak(stages_by_rank(job)) if quick else range(len(traces))
    return [rank_memory(traces[rank], rank) for rank in ranks]


def rank_traces(job: PlannedJob) -> list[CostTrace]:
    """The trace of every pipeline rank; ranks with equal stages share one."""
    settings = activation_settings(job)
    traces: dict[tuple[StageLayers, ...], CostTrace] = {}
    shared = []
    for rank, stages in enumerate(stages_by_rank(job)):
        if stages not in traces:
            traces[stages] = CostTrace(job, settings, rank)
        shared.append(traces[stages])
    return shared


def ranks_that_may_peak(stages_of_rank: list[tuple[StageLayers, ...]]) -> list[int]:
    """Of the ranks with equal stages, the first one has most micro-batches in flight. The last two ranks are where a
    V-shaped schedule turns.
    """
    count = len(stages_of_rank)
    firsts = {stages: rank for rank, stages in reversed(list(enumerate(stages_of_rank)))}
    return sorted({*firsts.values(), count - 1, max(0, count - 2)})


def activation_settings(job: PlannedJob) -> ActivationSettings:
    return ActivationSettings(
        job.layout,
        job.trainer,
        job.batch.micro,
        job.sequence,
        job.precision,
        job.activation_checkpoint,
        job.checkpoint_segment if job.activation_checkpoint == "full" else 1,
        job.context_method,
        on_cpu=job.cluster.device.is_cpu,
        has_documents=job.run_config is not None
        and isinstance(job.model, Architecture)
        and job.run_config.model.separator is not None,
        autocast=job.trainer.torch_native
        and (not job.trainer.master_bytes or job.trained.frozen > 0)
        and job.precision in ("bf16", "fp16")
        and not data_sharding(job).fsdp,
        expert_imbalance=job.expert_imbalance,
        trained=job.trained,
    )


def rank_memory(trace: CostTrace, rank: int) -> MemoryEstimate:
    """The memory of a rank when it is at its peak. Passes add up, so that the state before a pass follows from how
    often every pass has run: only the passes that may be at the peak are evaluated.
    """
    begin = MemoryWalk()
    begin.run(trace.begin)
    base, peak_total = tuple(begin.state), begin.total
    peak = base
    kinds, points = peak_points(trace.schedule, rank, trace.resharding, trace.partly)
    memories = [trace.memory(kind) for kind in kinds]
    totals = [sum(memory.change) for memory in memories]
    highest = max(points, key=lambda point: sum(map(mul, point[1], totals)) + memories[point[0]].peak_total)
    state = state_after(base, zip(memories, highest[1], strict=True))
    memory = memories[highest[0]]
    if sum(state) + memory.peak_total > peak_total:
        peak_total = sum(state) + memory.peak_total
        peak = tuple(map(add, state, memory.peak))
    final = state_after(base, ((trace.memory(kind), count) for kind, count in trace.counts_of(rank)))
    end = MemoryWalk(final)
    end.run(trace.end)
    if end.peak_total > peak_total:
        peak = end.peak
    tensors = MemoryEstimate(*peak, rank=rank)
    return with_device_memory(trace.job, tensors, final[GRADIENTS] - peak[GRADIENTS])


def state_after(base: Bytes, passes: Iterable[tuple[PassMemory, int]]) -> Bytes:
    """What is allocated after passes that ran so often."""
    state = list(base)
    for memory, count in passes:
        for index, change in enumerate(memory.change):
            state[index] += count * change
    return tuple(state)


def with_device_memory(job: PlannedJob, tensors: MemoryEstimate, later_gradients: float) -> MemoryEstimate:
    """Adds what a GPU needs besides tensors. The allocator's slack is a fraction of transient tensors, because
    persistent ones leave no gaps. Gradients that are allocated after the peak, and persist to the end of the step,
    fragment the memory that the activations of the next step need.
    """
    if job.cluster.device.is_cpu:
        return tensors
    trainer = job.trainer
    transient = tensors.activations + tensors.logits + tensors.unsharded
    groups = sum(degree > 1 for degree in (*job.layout.degrees, job.layout.expert))
    return replace(
        tensors,
        slack=trainer.allocator_slack * transient + max(0.0, later_gradients),
        context=trainer.device_context_bytes + groups * trainer.communicator_bytes,
    )


@dataclass(frozen=True)
class StateMemory:
    """Peak bytes of each memory class of one rank, each class on its own; exact on CPU.

    S is the bytes of a rank's padded shards, U one unsharded unit, u the same without padding, P all parameters.

    | shard | parameters | gradients |
    |---|---|---|
    | none (DDP) | P | P |
    | optimizer | S + all U | P |
    | gradients | S + all U | S + the largest u |
    | parameters | S + the largest U | S + the largest u |
    | parameters, with a pipeline | S + all U that the schedule unshards | P |
    """

    parameter: int
    gradient: int
    optimizer: int


def state_memory(
    config: RunConfig, layout: Layout, batch: Batch, rank: int = 0, traced: TracedModel | None = None
) -> StateMemory:
    """The state memory of one rank of a Meshwright run, for the model of the config, or for a user's model."""
    job = PlannedJob.of_run(config, layout, batch, UNKNOWN_HOST, traced=traced)
    trace = CostTrace(job, activation_settings(job), layout.coordinates(rank)["pipeline"])
    trace.rank = rank
    walk = MemoryWalk()
    walk.run(trace.begin)
    for kind in trace.passes:
        walk.add(trace.memory(kind))
    return StateMemory(round(walk.peak_parameters), round(walk.peak_gradients), round(walk.state[OPTIMIZER]))
