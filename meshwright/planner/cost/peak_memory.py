"""Peak memory of each pipeline rank of a job, by class."""

from __future__ import annotations

from dataclasses import replace

from meshwright.models.architecture import Architecture
from meshwright.planner.cost.activations import ActivationSettings
from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.fsdp_memory import StepMemory, data_sharding, stage_memory
from meshwright.planner.cost.in_flight import peak_candidates
from meshwright.planner.cost.megatron_memory import MegatronStepMemory
from meshwright.planner.cost.stage_parameters import StageLayers, stages_by_rank
from meshwright.planner.workload.planned_job import PlannedJob


def estimate_memory(job: PlannedJob, quick: bool = False) -> list[MemoryEstimate]:
    """Returns the estimate of every pipeline rank; with `quick`, only of ranks that may have the largest peak."""
    settings = activation_settings(job)
    step_memory: dict[tuple[StageLayers, ...], StepMemory] = {}  # most ranks have equal stages
    stages_of_rank = stages_by_rank(job)
    estimates = []
    for rank in ranks_that_may_peak(stages_of_rank) if quick else range(len(stages_of_rank)):
        layers = stages_of_rank[rank]
        if layers not in step_memory:
            stages = [stage_memory(job, settings, stage) for stage in layers]
            kind = StepMemory if job.trainer.torch_native else MegatronStepMemory
            step_memory[layers] = kind(job, settings, stages, rank)
        estimates.append(peak_memory(job, step_memory[layers], rank))
    return estimates


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
        and not job.trainer.master_bytes
        and job.precision in ("bf16", "fp16")
        and not data_sharding(job)[0],
    )


def peak_memory(job: PlannedJob, memory: StepMemory, rank: int) -> MemoryEstimate:
    peak = max(memory.update(), memory.pipeline_reduction(), key=lambda moment: moment.total)
    schedule = (job.schedule, job.layout.pipeline, job.batch.accumulation, job.stages_per_rank)
    for point in peak_candidates(*schedule, rank):
        for moment in memory.moments(point):
            if moment.total > peak.total:
                peak = moment
    later_gradients = memory.final_gradients() - peak.gradients
    return add_device_memory(job, memory.at(peak), later_gradients, memory.settings.on_cpu)


def add_device_memory(job: PlannedJob, tensors: MemoryEstimate, later_gradients: float, on_cpu: bool) -> MemoryEstimate:
    """Adds what a GPU needs besides tensors. The allocator's slack is a fraction of transient tensors, because
    persistent ones leave no gaps. Gradients that are allocated after the peak, and persist to the end of the step,
    fragment the memory that the activations of the next step need.
    """
    if on_cpu:
        return tensors
    trainer = job.trainer
    transient = tensors.activations + tensors.logits + tensors.unsharded
    groups = sum(degree > 1 for degree in (*job.layout.degrees, job.layout.expert))
    return replace(
        tensors,
        slack=trainer.allocator_slack * transient + max(0.0, later_gradients),
        context=trainer.device_context_bytes + groups * trainer.communicator_bytes,
    )
