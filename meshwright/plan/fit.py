"""Whether it fits: bytes of each rank of a pipeline at the peak of its step, by class, and what is in the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.plan.activations import Setting
from meshwright.plan.buffered import Buffered
from meshwright.plan.figures import Memory
from meshwright.plan.holding import Holding, spread, stage_of
from meshwright.plan.instants import instants
from meshwright.plan.job import Job
from meshwright.plan.weights import Part, parts_of

HOST = "cpu"
"""The device of which nothing but tensors is counted."""
CLASSES = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "communication")


def memory(job: Job) -> list[Memory]:
    """By rank of the pipeline."""
    setting = setting_of(job)
    holdings: dict[tuple[Part, ...], Holding] = {}  # most ranks hold the same
    found = []
    for place in range(job.layout.pipeline):
        parts = parts_of(job, place)
        if parts not in holdings:
            stages = [stage_of(job, setting, part) for part in parts]
            holdings[parts] = Holding(job, setting, stages) if job.stack.torch else Buffered(job, setting, stages)
        found.append(peak(job, holdings[parts], place))
    return found


def setting_of(job: Job) -> Setting:
    return Setting(
        job.layout,
        job.stack,
        job.batch.micro,
        job.sequence,
        job.precision,
        job.recompute,
        job.segment if job.recompute == "full" else 1,
        job.method,
        host=job.cluster.device.host or job.cluster.device.name == HOST,
        documents=job.run is not None and job.run.model.separator is not None,
        autocast=job.stack.torch and job.precision in ("bf16", "fp16") and not spread(job)[0],
    )


def peak(job: Job, held: Holding, place: int) -> Memory:
    fullest = max(held.update(), held.end(), key=lambda moment: moment.total)
    for instant in instants(job.schedule, job.layout.pipeline, job.batch.accumulation, job.stages, place):
        for moment in held.moments(instant):
            if moment.total > fullest.total:
                fullest = moment
    return with_device(job, held.at(fullest), held.left() - fullest.gradients, held.setting.host)


def with_device(job: Job, tensors: Memory, later: float, host: bool) -> Memory:
    """With what the device takes beside tensors. The allocator's slack is a share of what comes and goes: blocks that
    are there from the beginning leave no gaps. Gradients that come `later` than the peak, and stay to the end of the
    step, leave holes in which the next step's activations do not find room.
    """
    if host:
        return tensors
    stack = job.stack
    comes_and_goes = tensors.activations + tensors.logits + tensors.gathered
    groups = sum(degree > 1 for degree in (*job.layout.degrees, job.layout.expert))
    return replace(
        tensors,
        slack=stack.slack * comes_and_goes + max(0.0, later),
        context=stack.context + groups * stack.communicator,
    )


@dataclass(frozen=True)
class Excess:
    """Why a job does not fit: the rank of the pipeline that has most, and what of it would have to go."""

    place: int
    bytes: float
    """beyond the device's memory; negative: what is left"""
    binds: str
    """the largest class of those that a change could make smaller"""
    size: float
    """of that class"""
    classes: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.bytes <= 0


def excess(job: Job, stages: list[Memory] | None = None) -> Excess:
    """Of a job, or of its stages where they are known already."""
    stages = memory(job) if stages is None else stages
    place = max(range(len(stages)), key=lambda index: stages[index].total)
    classes = {name: getattr(stages[place], name) for name in CLASSES}
    binds = max(classes, key=lambda name: classes[name])
    return Excess(place, stages[place].total - job.cluster.device.memory, binds, classes[binds], classes)


CHANGES = {
    "parameters": "shard parameters, or more ranks on tensor or pipeline",
    "gradients": "shard gradients, or more ranks on tensor or pipeline",
    "optimizer": "shard the optimizer over more ranks, or offload it",
    "activations": "recompute more, a smaller micro-batch, or more ranks on context or tensor",
    "logits": "a smaller micro-batch, or more ranks on tensor or context",
    "gathered": "keep fewer units gathered, or more ranks on tensor",
    "communication": "fewer micro-batches in a pipeline",
}


def smallest_change(job: Job, stages: list[Memory] | None = None) -> str:
    """What binds, by how many bytes, and what makes that class smaller; empty where the job fits."""
    found = excess(job, stages)
    if found.fits:
        return ""
    return (
        f"{found.bytes / 1e9:.1f} GB too much on rank {found.place} of the pipeline: {found.binds} take "
        f"{found.size / 1e9:.1f} GB ({CHANGES[found.binds]})"
    )
