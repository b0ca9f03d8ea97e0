"""What one rank holds at each moment of a step, with parameters in FSDP2's units and stages on torch's schedules.

The peak is the fullest of these moments, at every instant of the schedule that may be it (`instants`):

| moment | activations | beside them |
|---|---|---|
| forward: the loss is computed | of all micro-batches in flight | logits, in the precision of compute and of the loss |
| inside: a block's forward pass | the same without logits | what passes through it |
| loss: its backward pass begins | of all in flight | logits, and two gradients of them; three where they are cut |
| head: its weight gets its gradient | the same without logits | their gradient, and that of the weight |
| last: the last block's backward pass | the same without the ends | what is recomputed, gradients inside a block |
| first: the first block's | one block of the micro-batch under way | the same, and gradients of all blocks behind |
| through: that is done | none of it | gradients of all weights |
| meets: a unit's gradients meet | of the units before it | its gradients, a flat copy of them, and their sum |
| update | none | parameters, gradients and optimizer |

| sharded | parameters held whole | gradients |
|---|---|---|
| nothing, by DDP | all, with no second copy | all, in buckets, from the beginning |
| optimizer | shards, and all units | all |
| gradients | shards, and all units | shards, and one block's |
| parameters | shards, the unit in use, and the next on its way | shards, and one block's |
| stages of a pipeline | as above, but all of a stage in backward | all |

Torch makes a buffer for what every micro-batch receives, once, and keeps them; its schedules of several stages a rank
let go of what was sent only at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.planner.cost.activations import (
    ActivationSettings,
    BlockActivations,
    HeadActivations,
    block_activations,
    head_activations,
)
from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.in_flight import SchedulePoint
from meshwright.planner.cost.stage_parameters import StageLayers, StageParameters, stage_parameters
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.parameter_shards import uses_ddp, uses_fsdp
from meshwright.topology.schedules import SCHEDULES


@dataclass(frozen=True)
class StageMemory:
    """One stage of a rank: what it has, and what each of its micro-batches keeps."""

    part: StageLayers
    has: StageParameters
    inner: BlockActivations
    head: HeadActivations | None
    blocks: float
    """that a micro-batch keeps of all its blocks"""
    kept: float
    """with its ends, without logits"""

    @property
    def logits(self) -> float:
        return self.head.logits if self.head else 0.0

    @property
    def waiting(self) -> float:
        """Between both parts of a backward pass in two."""
        return self.part.layers * self.inner.waiting + (self.head.waiting if self.head else 0.0)


def stage_memory(job: PlannedJob, setting: ActivationSettings, part: StageLayers) -> StageMemory:
    """What it receives lies in a buffer that is counted elsewhere; what it gives on it keeps."""
    layout, alone = job.layout, job.layout.pipeline == 1
    has = stage_parameters(job.model, part, layout.tensor, layout.expert, alone)
    inner = block_activations(job.model, setting, part.moe_layers > 0)
    last = head_activations(job.model, setting) if part.is_last else None
    blocks = part.dense_layers * block_activations(job.model, setting, False).kept if part.dense_layers else 0.0
    blocks += part.moe_layers * inner.kept if part.moe_layers else 0.0
    stream = setting.between * job.model.width * setting.stream
    gives = stream if job.trainer.keeps_stage_outputs and not part.next_on_rank else 0.0
    takes = stream if job.trainer.torch_native and not part.is_first else 0.0
    return StageMemory(part, has, inner, last, blocks, blocks + (last.kept if last else gives) - takes)


class TransientMemory(NamedTuple):
    """Bytes beside what is held all the time."""

    gradients: float
    activations: float
    logits: float = 0.0
    gathered: float = 0.0
    travelling: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def sharding_of(job: PlannedJob) -> tuple[bool, bool, int]:
    """Whether parameters are in FSDP2's units, whether DDP copies them, and over how many ranks they are divided."""
    layout = job.layout
    others = job.trainer.shards_over_context and job.sharding != "none" and layout.context > 1
    over = layout.shard * layout.context if layout.shard > 1 or others else 1
    return uses_fsdp(layout) or others, uses_ddp(layout) and not others, over


class StepMemory:
    """What a rank holds all the time, and what at each moment."""

    def __init__(self, job: PlannedJob, setting: ActivationSettings, stages: list[StageMemory]) -> None:
        self.job, self.setting, self.stages, self.stack = job, setting, stages, job.trainer
        layout, run = job.layout, job.run_config
        self.piped, self.micros = layout.pipeline > 1, job.batch.accumulation
        self.units, self.ddp, self.over = sharding_of(job)
        self.split = SCHEDULES[job.schedule].splits_backward
        double = 2.0 if job.precision == "fp64" else 1.0
        self.number, self.gradient = double * job.trainer.parameter_bytes, double * job.trainer.gradient_bytes
        self.state = double * job.trainer.optimizer_bytes
        self.compute = setting.number
        self.entry = self.number if job.trainer.residual_bytes else self.compute
        """bytes of the embedding once it is gathered: it sets the precision of the residual stream"""
        folded = layout.tensor if job.trainer.experts_over_tensor_axis else 1
        self.bank_over = max(1, self.over * folded // layout.expert) if self.over > 1 else 1
        self.keeps = not (job.sharding == "parameters" or (job.sharding == "none" and not self.piped))
        self.keeps |= job.trainer.keeps_stages_unsharded and self.piped
        self.keeps |= run is not None and run.fsdp.ranks_after_forward == 1 and job.sharding == "parameters"
        self.dense = sum(stage.has.dense for stage in stages)
        self.bank = sum(stage.has.experts for stage in stages)
        self.shards = self.dense / self.over + self.bank / self.bank_over
        self.stream = setting.between * job.model.width * setting.stream
        self.base = self.persistent()

    def persistent(self) -> MemoryEstimate:
        run = self.job.run_config
        owned = self.shards - sum(stage.has.tied_copy for stage in self.stages) / self.over
        offload = run is not None and run.optimizer.cpu_offload
        state = self.state * owned
        if offload:  # and a copy of the weights, but on the host
            state = state + self.number * owned if self.setting.host else 0.0
        ways = sum((not stage.part.is_first) + (not stage.part.is_last) for stage in self.stages)
        received = ways * self.micros * self.stream if self.piped else 0.0
        # Tokens and labels of a step; a pipeline joins them once more.
        batch = 16 * self.setting.tokens * self.micros * (2 if self.piped else 1)
        return MemoryEstimate(
            self.shards * self.number,
            self.dense * self.gradient if self.ddp else 0.0,
            state,
            batch,
            communication=received,
        )

    def left(self) -> float:
        """Gradients that the backward pass leaves for the update."""
        return 0.0 if self.ddp else self.shards * self.gradient

    def update(self) -> TransientMemory:
        """Foreach kernels take the roots of all second moments at once."""
        run = self.job.run_config
        roots = run is not None and run.optimizer.implementation != "fused"
        return TransientMemory(self.left(), self.shards * self.number * roots)

    def moments(self, instant: SchedulePoint) -> list[TransientMemory]:
        stage = self.stages[instant.stage]
        inner, layers = stage.inner, stage.part.layers
        kept = self.in_flight(instant)
        if instant.what == "F":
            cast = layers * inner.cast if self.job.activation_checkpoint != "none" else 0.0
            found = [self.moment(instant, "inside", kept - stage.logits + inner.forward)] if inner.forward else []
            if stage.head or cast:
                beside = stage.head.forward if stage.head else 0.0
                found.append(self.moment(instant, "forward", kept + cast, beside))
            return found  # else its backward pass holds more
        if instant.what == "I" or (instant.what == "W" and not stage.part.is_first):
            return self.halves(instant, stage, kept)
        found = []
        kept -= stage.logits
        if stage.head:
            found.append(self.moment(instant, "loss", kept, stage.logits + stage.head.backward))
            weight = (stage.has.head or stage.has.embedding) * self.gradient
            found.append(self.moment(instant, "head", kept + weight, stage.head.gradient))
            kept -= stage.head.kept
        through = kept - stage.blocks
        found.append(self.moment(instant, "last", kept + inner.backward))
        found.append(self.moment(instant, "first", through + inner.kept + inner.backward))
        found.append(self.moment(instant, "through", through))
        return [*found, *(self.meetings(instant, stage, kept) if self.units and not self.piped else [])]

    def meetings(self, instant: SchedulePoint, stage: StageMemory, kept: float) -> list[TransientMemory]:
        """FSDP2 copies a unit's gradients into one flat tensor, in the precision of sums, and gets the sum in another.
        The fullest are those of the head, with all blocks before it, and those of the last and the first block.
        """
        has, layers = stage.has, stage.part.layers
        before = instant.graded[instant.stage]
        whole = before and self.job.sharding in ("none", "optimizer")
        block, unit = has.block + has.block_experts, max(has.block, has.block_experts)
        share = self.shards / has.total
        gathered = self.gathered(instant, "loss")[0] if self.keeps else block * self.compute
        ahead = has.block * self.compute if self.over > 1 and not self.keeps else 0.0
        found = []
        for meets, left, met in (
            (has.head, layers, 0.0),
            (unit, layers - 1, has.head),
            (unit, 0, has.total - has.embedding - block),
        ):
            held = has.total - met * (1 - share) - meets if whole else self.shards if before else met * share
            new = self.gradient if whole else self.compute
            gradients = held * self.gradient + meets * (new + self.flat(meets, has))
            activations = kept - stage.blocks + left * stage.inner.kept + self.stream
            found.append(TransientMemory(gradients, activations, 0.0, gathered, ahead if left else 0.0))
        return found

    def flat(self, unit: float, has: StageParameters) -> float:
        """Bytes of a number of a unit whose gradients meet: the flat copy, and a share of the sum."""
        over = self.bank_over if unit == has.block_experts else self.over
        return (1 + 1 / over) * self.gradient

    def end(self) -> TransientMemory:
        """A pipeline's gradients, whole until then, meet after the last pass."""
        if not (self.units and self.piped):
            return TransientMemory(0.0, 0.0)
        sent = self.in_flight(SchedulePoint("B", 0, *((0,) * len(self.stages),) * 2, (self.micros,) * len(self.stages)))
        units = ((unit, each.has) for each in self.stages for unit in (each.has.block, each.has.block_experts))
        meeting = max(unit * self.flat(unit, has) for unit, has in units)
        return TransientMemory(sum(each.has.total for each in self.stages) * self.gradient + meeting, sent)

    def halves(self, instant: SchedulePoint, stage: StageMemory, kept: float) -> list[TransientMemory]:
        """A backward pass in two parts: the first one lets go of nothing until its end, and leaves gradients that
        the second one waits for. The first stage has no input that needs one, and leaves all to the second part.
        """
        if instant.what == "W":
            return [self.moment(instant, "through", kept - stage.logits + stage.waiting)]
        if stage.part.is_first:
            return []
        found = []
        if stage.head:
            found.append(self.moment(instant, "loss", kept - stage.logits, stage.logits + stage.head.backward))
            kept += stage.head.waiting
        found.append(self.moment(instant, "last", kept + stage.inner.halving))
        norm = 4 * self.stream  # a norm's backward pass, the last thing in a block
        waiting = stage.part.layers * stage.inner.waiting
        return [*found, self.moment(instant, "first", kept + waiting + norm)]

    def in_flight(self, instant: SchedulePoint) -> float:
        """Activations of all micro-batches, and what was sent of those that are through."""
        kept = 0.0 if self.several or not self.piped else self.stream  # then one is on its way
        rows = zip(self.flight, instant.live, instant.halfway, instant.through, strict=True)
        for (each, half, done), live, halfway, through in rows:
            kept += live * each + halfway * half + through * done
        return kept

    @cached_property
    def several(self) -> bool:
        return not SCHEDULES[self.job.schedule].single_stage

    @cached_property
    def flight(self) -> list[tuple[float, float, float]]:
        """By stage, bytes of a micro-batch: in flight, between both parts of its backward pass, and through."""
        found = []
        for stage in self.stages:
            half, done, part = 0.0 if stage.part.is_first else stage.waiting - stage.logits, 0.0, stage.part
            if self.several and self.stack.torch_native:
                forward, backward = (
                    not (part.is_last or part.next_on_rank),
                    not (part.is_first or part.previous_on_rank),
                )
                half, done = half + self.stream * backward, self.stream * (forward + backward)
            found.append((stage.kept + stage.logits, half, done))
        return found

    def moment(self, instant: SchedulePoint, when: str, activations: float, logits: float = 0.0) -> TransientMemory:
        gathered, travelling = self.gathered(instant, when) if self.units else (0.0, 0.0)
        return TransientMemory(self.gradients(instant, when), activations, logits, gathered, travelling)

    def at(self, moment: TransientMemory) -> MemoryEstimate:
        base = self.base
        return MemoryEstimate(
            base.parameters,
            base.gradients + moment.gradients,
            base.optimizer,
            base.activations + moment.activations,
            moment.logits,
            moment.gathered,
            base.communication + moment.travelling,
        )

    def gradients(self, instant: SchedulePoint, when: str) -> float:
        """Whole where an earlier micro-batch left them so, and of the blocks behind the one under way."""
        if self.ddp:
            return 0.0
        graded, whole = instant.graded, 0.0
        if any(graded):
            every = all(graded)
            rows = zip(self.stages, graded, strict=True)
            whole = self.dense + self.bank if every else sum(stage.has.total for stage, done in rows if done)
        here, before = self.stages[instant.stage].has, graded[instant.stage]
        now = block = 0.0
        if when == "last":
            now, block = here.head, here.down_projection
        elif when == "first":
            now, block = here.total - here.embedding - here.block - here.block_experts, here.down_projection
        elif when == "through":
            now, block = here.total, here.block + here.block_experts
        if not self.units or self.piped:
            new = 0 if before else now + (block if when != "through" else 0)
            return (whole + new) * self.gradient + (self.beside(instant) if self.units and self.split else 0.0)
        each_time = self.job.sharding in ("gradients", "parameters")
        if each_time or not before:
            share = self.shards if before else now * self.shards / here.total
            return share * self.gradient + block * self.compute
        left = now - block if when == "through" else now
        return (whole - left * (1 - self.shards / here.total)) * self.gradient + block * self.compute

    def beside(self, instant: SchedulePoint) -> float:
        """The second part of a backward pass in two leaves gradients of blocks in the precision of compute, beside the
        sum that FSDP2 keeps of them.
        """
        if self.compute == self.gradient:
            return 0.0
        stages = [
            each for each, done in zip(self.stages, instant.graded, strict=True) if done and not each.part.is_first
        ]
        return sum(each.has.total - each.has.embedding - each.has.head for each in stages) * self.compute

    @cached_property
    def all_units(self) -> float:
        """Bytes of them, gathered."""
        tables = sum(each.has.embedding for each in self.stages)
        return (self.dense + self.bank - tables) * self.compute + tables * self.entry

    def gathered(self, instant: SchedulePoint, when: str) -> tuple[float, float]:
        """Units that FSDP2 holds whole, and what it has on its way beside: the next unit, and gradients."""
        stage = self.stages[instant.stage].has
        late, shared = when in ("last", "first", "through"), self.over > 1
        table = stage.embedding * self.entry
        tied = table if self.job.model.tied_embeddings and not self.piped else 0.0
        block = self.setting.segment * (stage.block + stage.block_experts) * self.compute + tied
        head = tied + stage.head * self.compute
        ahead = (table if when in ("first", "through") else stage.block * self.compute) if shared else 0.0
        if self.piped:
            if self.keeps:
                return self.all_units, 0.0
            if len(self.stages) > 1:  # gathered at once
                return (stage.total - stage.embedding) * self.compute + table, ahead
            if when in ("first", "through"):
                return (stage.total - stage.embedding) * self.compute, ahead
            return (head if when == "loss" else block), ahead
        last = when == "last" or self.stages[instant.stage].part.layers == 1
        scattered = (stage.head if last else stage.block) if late and shared else 0.0
        if self.keeps:
            return self.all_units, scattered * self.gradient
        if late or when == "inside":
            return block, ahead + scattered * self.gradient
        return (head, head if shared else 0.0) if when == "forward" else (head, ahead)
