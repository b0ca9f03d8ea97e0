"""Whether it fits: bytes of each rank of a pipeline at the peak of its step, by class.

The peak is the fullest of these moments, at every instant of the schedule that may be it (`instants`):

| moment | activations | beside them |
|---|---|---|
| the loss is computed | of all micro-batches in flight | logits, in the precision of compute and of the loss |
| its backward pass begins | the same | logits, and two gradients of them; three where the vocabulary is cut |
| the head's weight gets its gradient | the same without logits | their gradient, and that of the weight |
| the last block's backward pass | the same | what is recomputed of a block, and gradients inside it |
| the first block's backward pass | one block of the micro-batch under way | the same, and gradients of all blocks behind |
| the first block is through | none of the micro-batch under way | gradients of all weights; on their way, its own |
| the update | none | parameters, gradients and optimizer |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.plan.activations import Block, Ends, Setting, block, ends
from meshwright.plan.figures import Memory
from meshwright.plan.instants import Instant, instants
from meshwright.plan.job import Job
from meshwright.plan.pieces import by_ddp, in_units
from meshwright.plan.weights import Part, Weights, parts_of, weights

HOST = "cpu"
"""The device of which nothing but tensors is counted."""


def memory(job: Job) -> list[Memory]:
    """By rank of the pipeline."""
    setting = setting_of(job)
    return [peak(job, setting, place) for place in range(job.layout.pipeline)]


def setting_of(job: Job) -> Setting:
    units = job.stack.own and in_units(job.layout)
    return Setting(
        job.layout,
        job.stack,
        job.batch.micro,
        job.sequence,
        job.precision,
        job.recompute,
        job.segment if job.recompute == "full" else 1,
        job.method,
        host=job.cluster.device.name == HOST,
        documents=job.run is not None and job.run.model.separator is not None,
        autocast=job.stack.own and job.precision in ("bf16", "fp16") and not units,
    )


@dataclass(frozen=True)
class Stage:
    """One stage of a rank: what it has, and what each of its micro-batches keeps."""

    part: Part
    has: Weights
    inner: Block
    ends: Ends | None
    kept: float
    """without logits"""

    @property
    def logits(self) -> float:
        return self.ends.logits if self.ends else 0.0

    @property
    def waiting(self) -> float:
        """Between both parts of a backward pass in two."""
        return self.part.layers * self.inner.waiting + (self.ends.waiting if self.ends else 0.0)


def stage_of(job: Job, setting: Setting, part: Part) -> Stage:
    layout, alone = job.layout, job.layout.pipeline == 1
    has = weights(job.model, part, layout.tensor, layout.expert, alone)
    inner = block(job.model, setting, part.experts > 0)
    last = ends(job.model, setting) if part.last else None
    kept = part.dense * block(job.model, setting, False).kept if part.dense else 0.0
    kept += part.experts * block(job.model, setting, True).kept if part.experts else 0.0
    stream = setting.between * job.model.width * setting.stream
    kept += (last.kept if last else 0 if part.hands else stream) - (0 if part.first else stream)
    return Stage(part, has, inner, last, kept)


def peak(job: Job, setting: Setting, place: int) -> Memory:
    stages = [stage_of(job, setting, part) for part in parts_of(job, place)]
    held = Holding(job, setting, stages)
    kind, micros = job.schedule, job.batch.accumulation
    found = [held.update()]
    for instant in instants(kind, job.layout.pipeline, micros, job.stages, place):
        found += held.moments(instant)
    return max(found, key=lambda moment: moment.tensors)


class Holding:
    """What a rank holds all the time, and what at each moment."""

    def __init__(self, job: Job, setting: Setting, stages: list[Stage]) -> None:
        self.job, self.setting, self.stages = job, setting, stages
        layout, run = job.layout, job.run
        self.units = in_units(layout)
        self.number = 8.0 if job.precision == "fp64" else 4.0
        self.compute = setting.number
        self.piped = layout.pipeline > 1
        sharded = layout.shard > 1
        self.over = layout.shard * layout.context if sharded else 1
        self.bank_over = max(1, self.over // layout.expert) if sharded else 1
        self.keeps = not (job.sharding == "parameters" or (job.sharding == "none" and not self.piped))
        self.keeps |= run is not None and run.shard.keep == 1 and job.sharding == "parameters"
        self.dense = sum(stage.has.dense for stage in stages)
        self.bank = sum(stage.has.bank for stage in stages)
        self.shards = self.dense / self.over + self.bank / self.bank_over
        self.stream = setting.between * job.model.width * setting.stream
        self.base = self.persistent()

    def persistent(self) -> Memory:
        job, layout = self.job, self.job.layout
        copied = sum(stage.has.copied for stage in self.stages) / self.over
        owned = self.shards - copied
        offload = job.run is not None and job.run.compute.offload
        moments = 2 + offload if self.setting.host or not offload else 0
        ways = sum((not stage.part.first) + (not stage.part.last) for stage in self.stages)
        received = ways * job.batch.accumulation * self.stream if self.piped else 0.0
        # Tokens and labels of a step; a pipeline joins them once more.
        batch = 16 * self.setting.tokens * job.batch.accumulation * (2 if self.piped else 1)
        gradient = self.dense * self.number if by_ddp(layout) else 0.0
        return Memory(self.shards * self.number, gradient, moments * owned * self.number, batch, communication=received)

    def update(self) -> Memory:
        gradients = self.shards * self.number
        return replace(self.base, gradients=gradients)

    def moments(self, instant: Instant) -> list[Memory]:
        stage = self.stages[instant.stage]
        inner, layers = stage.inner, stage.part.layers
        kept = self.in_flight(instant)
        if instant.what == "F":
            cast = layers * inner.cast if self.job.recompute != "none" else 0
            beside = stage.ends.forward if stage.ends else 0
            found = [self.moment(instant, "forward", kept + cast, beside)]
            return [*found, self.moment(instant, "inside", kept - stage.logits + inner.forward, 0)]
        if instant.what == "I" or (instant.what == "W" and not stage.part.first):
            return self.halves(instant, stage, kept)
        found = []
        kept -= stage.logits
        if stage.ends:
            found.append(self.moment(instant, "loss", kept, stage.logits + stage.ends.backward))
            weight = (stage.has.head or stage.has.embedding) * self.number
            found.append(self.moment(instant, "head", kept + weight, stage.ends.gradient))
            kept -= stage.ends.kept
        through = kept - layers * inner.kept
        found.append(self.moment(instant, "last", kept + inner.backward, 0))
        found.append(self.moment(instant, "first", through + inner.kept + inner.backward, 0))
        return [*found, self.moment(instant, "through", through, 0)]

    def halves(self, instant: Instant, stage: Stage, kept: float) -> list[Memory]:
        """A backward pass in two parts: the first one lets go of nothing until its end, and leaves gradients that
        the second one waits for. The first stage has no input that needs one, and leaves all to the second part.
        """
        if instant.what == "W":
            return [self.moment(instant, "through", kept - stage.logits + stage.waiting, 0)]
        if stage.part.first:
            return []
        found = []
        if stage.ends:
            found.append(self.moment(instant, "loss", kept - stage.logits, stage.logits + stage.ends.backward))
            kept += stage.ends.waiting
        found.append(self.moment(instant, "last", kept + stage.inner.halving, 0))
        norm = 4 * self.stream  # a norm's backward pass, the last thing in a block
        waiting = stage.part.layers * stage.inner.waiting
        return [*found, self.moment(instant, "first", kept + waiting + norm, 0)]

    def in_flight(self, instant: Instant) -> float:
        """Activations of all micro-batches. Torch's schedules of several stages a rank let go of what they sent only at
        the end of a step: outputs of passes that are through, and gradients of inputs.
        """
        kept, several = 0.0, len(self.stages) > 1 or self.job.schedule == "zero-bubble"
        for index, stage in enumerate(self.stages):
            live, halfway, through = instant.live[index], instant.halfway[index], instant.through[index]
            kept += live * (stage.kept + stage.logits)
            kept += 0 if stage.part.first else halfway * (stage.waiting - stage.logits)
            if several and self.job.stack.own:
                sends = not (stage.part.last or stage.part.hands), not (stage.part.first or stage.part.takes)
                kept += self.stream * (through * sends[0] + (through + halfway) * sends[1])
        if self.piped and not several:  # one on its way each way
            kept += self.stream
        return kept

    def moment(self, instant: Instant, when: str, activations: float, logits: float) -> Memory:
        gathered, travelling = self.gathered(instant, when) if self.units else (0.0, 0.0)
        return replace(
            self.base,
            gradients=self.gradients(instant, when),
            activations=self.base.activations + activations,
            logits=logits,
            gathered=gathered,
            communication=self.base.communication + travelling,
        )

    def gradients(self, instant: Instant, when: str) -> float:
        """Whole where an earlier micro-batch left them so, and of the blocks behind the one under way."""
        if by_ddp(self.job.layout):
            return self.base.gradients
        whole = sum(stage.has.all for stage, graded in zip(self.stages, instant.graded, strict=True) if graded)
        here, before = self.stages[instant.stage].has, instant.graded[instant.stage]
        behind = {"last": here.head, "first": here.all - here.embedding - here.block - here.block_bank}
        behind["through"] = here.all
        now = behind.get(when, 0.0)
        block = {"last": here.down, "first": here.down, "through": here.block + here.block_bank}.get(when, 0.0)
        if not self.units or self.piped:
            return (whole + (0 if before else now + (block if when != "through" else 0))) * self.number
        if self.job.sharding in ("gradients", "parameters") or not before:
            share = self.shards if before else now * self.shards / here.all
            return (share + block) * self.number
        return whole * self.number

    def gathered(self, instant: Instant, when: str) -> tuple[float, float]:
        """Units that FSDP2 holds whole, and what it has on its way beside: the next unit, and gradients."""
        stage = self.stages[instant.stage].has
        tied = self.job.model.tied and not self.piped
        ends = sum(each.has.embedding for each in self.stages) * self.number
        whole = sum(each.has.all - each.has.embedding for each in self.stages) * self.compute + ends
        block = self.setting.segment * (stage.block + stage.block_bank) * self.compute
        head = (stage.embedding * self.number if tied else 0) + stage.head * self.compute
        late = when in ("last", "first", "through")
        ahead = stage.block * self.compute if self.over > 1 else 0.0
        if when in ("first", "through"):  # of the units nothing but the embedding is left
            ahead = stage.embedding * self.number if self.over > 1 else 0.0
        if self.piped:
            here = (stage.all - stage.embedding) * self.compute + stage.embedding * self.number
            if self.keeps:
                return whole, 0.0
            if len(self.stages) > 1:  # gathered at once
                return here, ahead
            least = head if when == "loss" else block
            return (here - stage.embedding * self.number if when in ("first", "through") else least), ahead
        scattered = stage.block * (self.over > 1) if late else 0.0
        scattered += stage.block_bank * (self.bank_over > 1) if when == "through" else 0.0
        if self.keeps:
            return whole, scattered * self.number
        if late or when == "inside":
            return block + (stage.embedding * self.number if tied else 0), ahead + scattered * self.number
        if when == "forward":
            return head, head if self.over > 1 else 0.0
        return head, ahead
