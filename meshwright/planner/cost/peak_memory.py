"""Whether it fits: bytes of each rank of a pipeline at the peak of its step, by class."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.cost.activations import ActivationSettings
from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.fsdp_memory import StepMemory, sharding_of, stage_memory
from meshwright.planner.cost.in_flight import peak_candidates
from meshwright.planner.cost.megatron_memory import MegatronStepMemory
from meshwright.planner.cost.stage_parameters import StageLayers, stages_by_rank
from meshwright.planner.workload.planned_job import PlannedJob


def estimate_memory(job: PlannedJob, quick: bool = False) -> list[MemoryEstimate]:
    """By rank of the pipeline; `quick`: of those alone of which one is the heaviest."""
    setting = setting_of(job)
    holdings: dict[tuple[StageLayers, ...], StepMemory] = {}  # most ranks hold the same
    held = stages_by_rank(job)
    found = []
    for place in telling(held) if quick else range(len(held)):
        parts = held[place]
        if parts not in holdings:
            stages = [stage_memory(job, setting, part) for part in parts]
            holdings[parts] = (
                StepMemory(job, setting, stages)
                if job.trainer.torch_native
                else MegatronStepMemory(job, setting, stages)
            )
        found.append(peak(job, holdings[parts], place))
    return found


def telling(held: list[tuple[StageLayers, ...]]) -> list[int]:
    """Of ranks that hold the same the first, which has most micro-batches in flight, and the last two, where a V of
    stages turns.
    """
    count = len(held)
    firsts = {parts: place for place, parts in reversed(list(enumerate(held)))}
    return sorted({*firsts.values(), count - 1, max(0, count - 2)})


def setting_of(job: PlannedJob) -> ActivationSettings:
    return ActivationSettings(
        job.layout,
        job.trainer,
        job.batch.micro,
        job.sequence,
        job.precision,
        job.activation_checkpoint,
        job.checkpoint_segment if job.activation_checkpoint == "full" else 1,
        job.context_method,
        host=job.cluster.device.is_cpu,
        documents=job.run_config is not None and job.run_config.model.separator is not None,
        autocast=job.trainer.torch_native and job.precision in ("bf16", "fp16") and not sharding_of(job)[0],
    )


def peak(job: PlannedJob, held: StepMemory, place: int) -> MemoryEstimate:
    fullest = max(held.update(), held.end(), key=lambda moment: moment.total)
    for instant in peak_candidates(
        job.schedule, job.layout.pipeline, job.batch.accumulation, job.stages_per_rank, place
    ):
        for moment in held.moments(instant):
            if moment.total > fullest.total:
                fullest = moment
    return with_device(job, held.at(fullest), held.left() - fullest.gradients, held.setting.host)


def with_device(job: PlannedJob, tensors: MemoryEstimate, later: float, host: bool) -> MemoryEstimate:
    """With what the device takes beside tensors. The allocator's slack is a share of what comes and goes: blocks that
    are there from the beginning leave no gaps. Gradients that come `later` than the peak, and stay to the end of the
    step, leave holes in which the next step's activations do not find room.
    """
    if host:
        return tensors
    stack = job.trainer
    comes_and_goes = tensors.activations + tensors.logits + tensors.unsharded
    groups = sum(degree > 1 for degree in (*job.layout.degrees, job.layout.expert))
    return replace(
        tensors,
        slack=stack.allocator_slack * comes_and_goes + max(0.0, later),
        context=stack.device_context_bytes + groups * stack.communicator_bytes,
    )
