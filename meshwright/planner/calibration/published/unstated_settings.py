"""Chooses the settings that a published run does not state, and lists what else they may have been.

A run that ran fitted into memory, so the least activation checkpointing that fits is assumed, and FSDP if nothing else
fits. On a device whose host memory is reached over NVLink, activations that do not fit are assumed to be offloaded, if
the link can move them during the step. The spread of the predictions over the other plausible values widens the
interval of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.published.published_schedules import MAX_PASSES, MAX_STAGES, count_passes
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.cost.trace.schedule_passes import ScheduleSize
from meshwright.planner.workload.planned_job import PlannedJob

CHECKPOINT_MODES = ("none", "selective", "alternate", "full")
"""Modes of activation checkpointing, in the order in which they save more and recompute more."""
CHECKPOINT_WORDS = {
    "none": "no activation checkpointing",
    "selective": "selective activation checkpointing",
    "alternate": "activation checkpointing of every other block",
    "full": "full activation checkpointing",
}


@dataclass(frozen=True)
class Assumed:
    """A job whose unstated settings are assumed."""

    job: PlannedJob
    assumptions: tuple[str, ...]
    alternatives: tuple[tuple[PlannedJob, ...], ...]
    """for each unstated setting, the job with other plausible values of it"""
    offloaded: float = 0.0
    """bytes of activations that are assumed to be in host memory"""
    made_to_fit: bool = False
    """whether a setting was chosen because the job fits with it"""


def excess_bytes(job: PlannedJob) -> float:
    """Bytes that a job needs beyond the memory of its device; the allocator's slack may be returned."""
    return max(memory.required for memory in estimate_memory(job, quick=True)) - job.cluster.device.memory


def run_fits(job: PlannedJob) -> bool:
    """Whether a job can run at all."""
    return excess_bytes(job) <= 0


def offloadable_bytes(job: PlannedJob) -> float:
    """The excess of a job if its host can take it while the step computes; else 0."""
    excess = excess_bytes(job)
    device = job.cluster.device
    rate = device.host_bandwidth if device.host == "grace" else 0.0
    moved = 2 * excess * job.batch.accumulation / max(1, job.layout.pipeline)  # to the host and back, by micro-batches
    return excess if 0 < moved <= rate * estimate_step(job, []).seconds else 0.0


def assume_settings(job: PlannedJob, unstated: frozenset[str]) -> Assumed:
    """Chooses activation checkpointing, sharding, micro-batch and stages per rank, as far as they are unstated."""
    assumptions: list[str] = []
    offloaded = 0.0
    if "stages" in unstated:
        job = with_stages(job, likely_stages(job))
        assumptions.append(f"{job.stages_per_rank} stages per pipeline rank, which the run does not state")
    if unstated & {"checkpoint", "sharding"}:
        offloaded = offloadable_bytes(job) if "checkpoint" in unstated else 0.0
        if not offloaded:
            tried = list(attempts(job, unstated))
            job = next((attempt for attempt in tried if run_fits(attempt)), tried[-1])
    if offloaded:
        assumptions.append(f"{offloaded / 2**30:.0f} GiB of activations offloaded to the host, which do not fit")
    elif "checkpoint" in unstated:
        reason = "the least that fits" if run_fits(job) else "with which the run does not fit, either"
        assumptions.append(f"{CHECKPOINT_WORDS[job.activation_checkpoint]}, {reason}")
    if "sharding" in unstated and job.sharding != job.trainer.default_sharding:
        assumptions.append("parameters sharded over data-parallel ranks, because the run does not fit otherwise")
    if "micro_batch" in unstated:
        assumptions.append(f"micro-batch of {job.batch.micro}")
    alternatives = (
        checkpoint_alternatives(job) if "checkpoint" in unstated else (),
        micro_alternatives(job) if "micro_batch" in unstated else (),
        stage_alternatives(job) if "stages" in unstated else (),
    )
    changed = "checkpoint" in unstated or ("sharding" in unstated and job.sharding != job.trainer.default_sharding)
    made_to_fit = changed and (bool(offloaded) or run_fits(job))
    plausible = tuple(jobs for jobs in alternatives if jobs)
    return Assumed(job, tuple(assumptions), plausible, offloaded, made_to_fit)


def attempts(job: PlannedJob, unstated: frozenset[str]) -> Iterator[PlannedJob]:
    """The job with more and more activation checkpointing, and then the same with sharded parameters."""
    modes = CHECKPOINT_MODES if "checkpoint" in unstated else (job.activation_checkpoint,)
    yield from (replace(job, activation_checkpoint=mode) for mode in modes)
    layout = job.layout
    if "sharding" in unstated and layout.data_degree > 1 and layout.pipeline == 1:
        sharded = Layout(1, 1, layout.data_degree, layout.context, layout.tensor, layout.expert)
        for mode in modes:
            yield replace(job, activation_checkpoint=mode, layout=sharded, sharding="parameters")


def checkpoint_alternatives(job: PlannedJob) -> tuple[PlannedJob, ...]:
    """The next two modes up and down."""
    index = CHECKPOINT_MODES.index(job.activation_checkpoint)
    nearby = (*CHECKPOINT_MODES[max(0, index - 2) : index], *CHECKPOINT_MODES[index + 1 : index + 3])
    return tuple(replace(job, activation_checkpoint=mode) for mode in nearby)


def micro_alternatives(job: PlannedJob) -> tuple[PlannedJob, ...]:
    """Larger micro-batches that divide the batch of a rank."""
    local = job.batch.micro * job.batch.accumulation
    sizes = [size for size in (2, 4) if size > job.batch.micro and local % size == 0]
    return tuple(replace(job, batch=replace(job.batch, micro=size, accumulation=local // size)) for size in sizes)


def numbers_of_stages(job: PlannedJob) -> list[int]:
    """The numbers of stages per rank into which the layers divide, as far as their passes are predicted."""
    layers = job.model.layers + (2 if job.model.layers % job.layout.pipeline else 0)  # embedding and head as layers
    per_rank = max(1, layers // job.layout.pipeline)
    passes = count_passes(schedule_size(with_stages(job, 1)))
    most = max(1, min(per_rank, MAX_STAGES // job.layout.pipeline, MAX_PASSES // passes))
    return [count for count in range(1, most + 1) if per_rank % count == 0]


def schedule_size(job: PlannedJob) -> ScheduleSize:
    return ScheduleSize(job.schedule, job.layout.pipeline, job.batch.accumulation, job.stages_per_rank)


def schedule_sizes(job: PlannedJob, unstated: frozenset[str]) -> list[ScheduleSize]:
    """The largest schedule that a job is predicted with, and the others if its stages per rank are not stated."""
    counts = numbers_of_stages(job) if "stages" in unstated else [job.stages_per_rank]
    tried = {counts[0], counts[len(counts) // 2], counts[-1]}
    return [schedule_size(job if count == job.stages_per_rank else with_stages(job, count)) for count in tried]


def likely_stages(job: PlannedJob) -> int:
    """The middle of the possible numbers of stages per rank."""
    counts = numbers_of_stages(job)
    return counts[len(counts) // 2]


def with_stages(job: PlannedJob, stages: int) -> PlannedJob:
    return replace(job, stages_per_rank=stages, schedule="interleaved" if stages > 1 else "1f1b")


def stage_alternatives(job: PlannedJob) -> tuple[PlannedJob, ...]:
    """One stage per rank, and as many as possible."""
    counts = numbers_of_stages(job)
    return tuple(with_stages(job, count) for count in {1, counts[-1]} - {job.stages_per_rank})
