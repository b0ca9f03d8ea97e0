"""Memory of one rank at the points of a step where it may peak, with FSDP2 units and torch's pipeline schedules.

At each schedule point that may be the peak (`peak_candidates`), memory is evaluated at these moments of the action:

| moment | activations | in addition |
|---|---|---|
| loss_forward | all micro-batches in flight | logits in the compute dtype and in float32 |
| block_forward | the same without logits | temporary tensors of one block |
| loss_backward | all in flight | logits and two gradients of them; three if the head is vocabulary-parallel |
| head_backward | the same without logits | the gradient of the logits, and of the head's weight |
| last_block | the same without the head | recomputed activations and gradients of one block |
| first_block | one block of the micro-batch | the same, and gradients of all blocks behind it |
| stage_done | none of the micro-batch | gradients of all weights |
| reduction | those of the blocks before the unit | the unit's gradients, a flat copy, and their reduced shard |
| update | none | parameters, gradients and optimizer state |

| shard | unsharded parameters | gradients |
|---|---|---|
| none (DDP) | all, without a second copy | all, in buckets, throughout |
| optimizer | shards and all units | all |
| gradients | shards and all units | shards, and those of one block |
| parameters | shards, the unit in use, and the prefetched one | shards, and those of one block |
| with a pipeline | as above, but all units of a stage in backward | all |

torch allocates a receive buffer for every micro-batch once, and keeps them. Its schedules with several stages per rank
keep tensors that were sent until the end of the step.
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
    hidden_state_bytes,
    input_bytes,
    outer_activations,
)
from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.in_flight import SchedulePoint
from meshwright.planner.cost.stage_parameters import StageLayers, StageParameters, stage_parameters
from meshwright.planner.workload.optimizer_bytes import FACTORED, factored_state_bytes, trainable_fraction
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.parameter_shards import uses_ddp, uses_fsdp
from meshwright.topology.schedules import SCHEDULES


@dataclass(frozen=True)
class StageMemory:
    """The parameters of one stage, and the activations that each of its micro-batches saves."""

    layers: StageLayers
    parameters: StageParameters
    block: BlockActivations
    head: HeadActivations | None
    saved_blocks: float
    """bytes that a micro-batch saves in all blocks of the stage"""
    saved: float
    """the same with the head or the stage output, without logits"""

    @property
    def logits(self) -> float:
        return self.head.logits if self.head else 0.0

    @property
    def deferred(self) -> float:
        """Gradients of a micro-batch that wait for the weight gradients of a split backward pass."""
        return self.layers.layers * self.block.deferred + (self.head.deferred if self.head else 0.0)


def stage_memory(job: PlannedJob, settings: ActivationSettings, layers: StageLayers) -> StageMemory:
    """The stage's input is in a receive buffer, which is counted elsewhere; its output is saved."""
    layout, no_pipeline = job.layout, job.layout.pipeline == 1
    parameters = stage_parameters(job.model, layers, layout.tensor, layout.expert, no_pipeline)
    block = block_activations(job.model, settings, layers.moe_layers > 0)
    head = head_activations(job.model, settings) if layers.is_last else None
    saved = layers.dense_layers * block_activations(job.model, settings, False).saved if layers.dense_layers else 0.0
    saved += layers.moe_layers * block.saved if layers.moe_layers else 0.0
    residual = hidden_state_bytes(job.model, settings)
    output = residual if job.trainer.keeps_stage_outputs and not layers.next_on_rank else 0.0
    outer = outer_activations(job.model, settings) if layers.is_first else 0.0
    received = residual if job.trainer.torch_native and not layers.is_first else 0.0
    return StageMemory(
        layers, parameters, block, head, saved, saved + outer + (head.saved if head else output) - received
    )  # fmt: skip


class TransientMemory(NamedTuple):
    """Bytes in addition to what is allocated throughout the step."""

    gradients: float
    activations: float
    logits: float = 0.0
    unsharded: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def data_sharding(job: PlannedJob) -> tuple[bool, bool, int]:
    """Whether FSDP shards the parameters, whether DDP replicates them, and the size of the shard group."""
    layout = job.layout
    over_context = job.trainer.shards_over_context and job.sharding != "none" and layout.context > 1
    shard_ranks = layout.shard * layout.context if layout.shard > 1 or over_context else 1
    return uses_fsdp(layout) or over_context, uses_ddp(layout) and not over_context, shard_ranks


class StepMemory:
    """The memory of one pipeline rank: what is allocated throughout the step, and what at each moment."""

    def __init__(
        self, job: PlannedJob, settings: ActivationSettings, stages: list[StageMemory], pipeline_rank: int
    ) -> None:
        self.job, self.settings, self.stages, self.trainer = job, settings, stages, job.trainer
        self.pipeline_rank = pipeline_rank
        layout, config = job.layout, job.run_config
        self.pipelined, self.micro_steps = layout.pipeline > 1, job.batch.accumulation
        self.fsdp, self.ddp, self.shard_ranks = data_sharding(job)
        self.splits_backward = SCHEDULES[job.schedule].splits_backward
        double = 2.0 if job.precision == "fp64" else 1.0
        self.parameter_bytes = double * job.trainer.parameter_bytes
        self.gradient_bytes = double * job.trainer.gradient_bytes * trainable_fraction(config, job.model)
        self.optimizer_bytes = double * job.optimizer_bytes
        self.compute_bytes = settings.compute_bytes
        # The unsharded embedding sets the dtype of the residual stream.
        self.embedding_bytes = self.parameter_bytes if job.trainer.residual_bytes else self.compute_bytes
        over_tensor = layout.tensor if job.trainer.experts_over_tensor_axis else 1
        self.expert_shard_ranks = (
            max(1, self.shard_ranks * over_tensor // layout.expert) if self.shard_ranks > 1 else 1
        )  # fmt: skip
        self.stays_unsharded = not (job.sharding == "parameters" or (job.sharding == "none" and not self.pipelined))
        self.stays_unsharded |= job.trainer.keeps_stages_unsharded and self.pipelined
        self.stays_unsharded |= (
            config is not None and config.fsdp.ranks_after_forward == 1 and job.sharding == "parameters"
        )  # fmt: skip
        self.dense = sum(stage.parameters.dense for stage in stages)
        self.experts = sum(stage.parameters.experts for stage in stages)
        self.shards = self.dense / self.shard_ranks + self.experts / self.expert_shard_ranks
        self.residual = hidden_state_bytes(job.model, settings)
        self.base = self.persistent()

    def persistent(self) -> MemoryEstimate:
        """What is allocated throughout the step."""
        config = self.job.run_config
        owned = self.shards - sum(stage.parameters.tied_copy for stage in self.stages) / self.shard_ranks
        state = self.optimizer_bytes * owned
        if config is not None and config.optimizer.kind in FACTORED:
            element_size = int(self.parameter_bytes)
            state = factored_state_bytes(config, self.job.layout, self.job.model, self.pipeline_rank, element_size)
        elif config is not None and config.optimizer.cpu_offload:  # with a copy of the parameters
            state += self.parameter_bytes * owned
        if config is not None and config.optimizer.cpu_offload and not self.settings.on_cpu:
            state = 0.0  # it is in host memory
        neighbours = sum((not stage.layers.is_first) + (not stage.layers.is_last) for stage in self.stages)
        receive_buffers = neighbours * self.micro_steps * self.residual if self.pipelined else 0.0
        # The inputs of the step, which a pipeline concatenates.
        batch = input_bytes(self.job.model, self.settings) * self.micro_steps * (2 if self.pipelined else 1)
        return MemoryEstimate(
            self.shards * self.parameter_bytes,
            self.dense * self.gradient_bytes if self.ddp else 0.0,
            state,
            batch,
            communication=receive_buffers,
        )

    def final_gradients(self) -> float:
        """Bytes of gradients that exist after backward, for the update."""
        return 0.0 if self.ddp else self.shards * self.gradient_bytes

    def update(self) -> TransientMemory:
        """The optimizer update: foreach kernels allocate the square roots of all second moments at once."""
        config = self.job.run_config
        foreach = config is not None and config.optimizer.implementation != "fused"
        return TransientMemory(self.final_gradients(), self.shards * self.parameter_bytes * foreach)

    def moments(self, point: SchedulePoint) -> list[TransientMemory]:
        """The moments of one action at which memory may peak."""
        stage = self.stages[point.stage]
        block, layers = stage.block, stage.layers.layers
        saved = self.activations_in_flight(point)
        moments = []
        if point.op == "F":
            cast = layers * block.autocast_weights if self.job.activation_checkpoint != "none" else 0.0
            if block.forward_peak:
                moments.append(self.moment(point, "block_forward", saved - stage.logits + block.forward_peak))
            if stage.head or cast:
                logits = stage.head.forward_peak if stage.head else 0.0
                moments.append(self.moment(point, "loss_forward", saved + cast, logits))
            return moments  # otherwise the backward pass needs more
        if point.op == "I" or (point.op == "W" and not stage.layers.is_first):
            return self.split_backward_moments(point, stage, saved)
        saved -= stage.logits
        if stage.head:
            moments.append(self.moment(point, "loss_backward", saved, stage.logits + stage.head.backward_peak))
            weight_gradient = (stage.parameters.head or stage.parameters.embedding) * self.gradient_bytes
            moments.append(self.moment(point, "head_backward", saved + weight_gradient, stage.head.logit_gradient))
            saved -= stage.head.saved
        without_blocks = saved - stage.saved_blocks
        moments.append(self.moment(point, "last_block", saved + block.backward_peak))
        moments.append(self.moment(point, "first_block", without_blocks + block.saved + block.backward_peak))
        moments.append(self.moment(point, "stage_done", without_blocks))
        return [*moments, *(self.reductions(point, stage, saved) if self.fsdp and not self.pipelined else [])]

    def reductions(self, point: SchedulePoint, stage: StageMemory, saved: float) -> list[TransientMemory]:
        """FSDP2 copies the gradients of a unit into one flat tensor and reduce-scatters it into another. The largest of
        these moments are those of the head, when all blocks are still saved, and of the last and the first block.
        """
        parameters, layers = stage.parameters, stage.layers.layers
        accumulated = point.has_gradients[point.stage]
        keeps_full = accumulated and self.job.sharding in ("none", "optimizer")
        block = parameters.block + parameters.block_experts
        unit = max(parameters.block, parameters.block_experts)
        shard_fraction = self.shards / parameters.total
        unsharded = block * self.compute_bytes
        if self.stays_unsharded:
            unsharded = self.unsharded_parameters(point, "loss_backward")[0]
        prefetches = self.shard_ranks > 1 and not self.stays_unsharded
        prefetched = parameters.block * self.compute_bytes if prefetches else 0.0
        moments = []
        for reduced, remaining_layers, done in (
            (parameters.head, layers, 0.0),
            (unit, layers - 1, parameters.head),
            (unit, 0, parameters.total - parameters.embedding - block),
        ):
            if keeps_full:
                existing = parameters.total - done * (1 - shard_fraction) - reduced
            else:
                existing = self.shards if accumulated else done * shard_fraction
            new_bytes = self.gradient_bytes if keeps_full else self.compute_bytes
            flat_bytes = self.flat_gradient_bytes(reduced, parameters)
            gradients = existing * self.gradient_bytes + reduced * (new_bytes + flat_bytes)
            activations = saved - stage.saved_blocks + remaining_layers * stage.block.saved + self.residual
            moments.append(
                TransientMemory(gradients, activations, 0.0, unsharded, prefetched if remaining_layers else 0.0)
            )  # fmt: skip
        return moments

    def flat_gradient_bytes(self, unit: float, parameters: StageParameters) -> float:
        """Bytes per element of a unit in reduction: the flat copy, and the reduced shard."""
        ranks = self.expert_shard_ranks if unit == parameters.block_experts else self.shard_ranks
        return (1 + 1 / ranks) * self.gradient_bytes

    def pipeline_reduction(self) -> TransientMemory:
        """A pipeline reduces its gradients, which are unsharded until then, after the last action."""
        if not (self.fsdp and self.pipelined):
            return TransientMemory(0.0, 0.0)
        none, all_done = (0,) * len(self.stages), (self.micro_steps,) * len(self.stages)
        sent = self.activations_in_flight(SchedulePoint("B", 0, none, none, all_done))
        parameters = [stage.parameters for stage in self.stages]
        units = ((unit, stage) for stage in parameters for unit in (stage.block, stage.block_experts))
        largest = max(unit * self.flat_gradient_bytes(unit, stage) for unit, stage in units)
        return TransientMemory(sum(stage.total for stage in parameters) * self.gradient_bytes + largest, sent)

    def split_backward_moments(self, point: SchedulePoint, stage: StageMemory, saved: float) -> list[TransientMemory]:
        """A split backward pass: I frees nothing until its end, and leaves gradients for W. The first stage needs no
        input gradient, and leaves everything to W.
        """
        if point.op == "W":
            return [self.moment(point, "stage_done", saved - stage.logits + stage.deferred)]
        if stage.layers.is_first:
            return []
        moments = []
        if stage.head:
            logits = stage.logits + stage.head.backward_peak
            moments.append(self.moment(point, "loss_backward", saved - stage.logits, logits))
            saved += stage.head.deferred
        moments.append(self.moment(point, "last_block", saved + stage.block.input_backward_peak))
        norm = 4 * self.residual  # the backward pass of a norm is the last one of a block
        deferred = stage.layers.layers * stage.block.deferred
        return [*moments, self.moment(point, "first_block", saved + deferred + norm)]

    def activations_in_flight(self, point: SchedulePoint) -> float:
        """Activations of all micro-batches in flight, and the tensors that completed ones have sent."""
        total = 0.0 if self.several_stages or not self.pipelined else self.residual  # one is being sent
        counts = zip(self.micro_batch_bytes, point.in_flight, point.between_i_and_w, point.completed, strict=True)
        for (saved, deferred, sent), in_flight, between, completed in counts:
            total += in_flight * saved + between * deferred + completed * sent
        return total

    @cached_property
    def several_stages(self) -> bool:
        return not SCHEDULES[self.job.schedule].single_stage

    @cached_property
    def micro_batch_bytes(self) -> list[tuple[float, float, float]]:
        """By stage, bytes of a micro-batch: in flight, in addition between I and W, and after completion."""
        rows = []
        for stage in self.stages:
            layers, sent = stage.layers, 0.0
            deferred = 0.0 if layers.is_first else stage.deferred - stage.logits
            if self.several_stages and self.trainer.torch_native:
                sends_output = not (layers.is_last or layers.next_on_rank)
                sends_gradient = not (layers.is_first or layers.previous_on_rank)
                deferred = deferred + self.residual * sends_gradient
                sent = self.residual * (sends_output + sends_gradient)
            rows.append((stage.saved + stage.logits, deferred, sent))
        return rows

    def moment(self, point: SchedulePoint, name: str, activations: float, logits: float = 0.0) -> TransientMemory:
        unsharded, communication = self.unsharded_parameters(point, name) if self.fsdp else (0.0, 0.0)
        return TransientMemory(self.gradients(point, name), activations, logits, unsharded, communication)

    def at(self, moment: TransientMemory) -> MemoryEstimate:
        base = self.base
        return MemoryEstimate(
            base.parameters,
            base.gradients + moment.gradients,
            base.optimizer,
            base.activations + moment.activations,
            moment.logits,
            moment.unsharded,
            base.communication + moment.communication,
        )

    def gradients(self, point: SchedulePoint, moment: str) -> float:
        """Bytes of gradients: those that earlier micro-batches left, and those of the blocks behind the current one."""
        if self.ddp:
            return 0.0
        has_gradients, full = point.has_gradients, 0.0
        if any(has_gradients):
            rows = zip(self.stages, has_gradients, strict=True)
            everything = self.dense + self.experts
            full = everything if all(has_gradients) else sum(stage.parameters.total for stage, has in rows if has)
        parameters, accumulated = self.stages[point.stage].parameters, has_gradients[point.stage]
        done = current = 0.0
        if moment == "last_block":
            done, current = parameters.head, parameters.down_projection
        elif moment == "first_block":
            done = parameters.total - parameters.embedding - parameters.block - parameters.block_experts
            current = parameters.down_projection
        elif moment == "stage_done":
            done, current = parameters.total, parameters.block + parameters.block_experts
        if not self.fsdp or self.pipelined:
            new = 0 if accumulated else done + (current if moment != "stage_done" else 0)
            extra = self.unaccumulated_gradients(point) if self.fsdp and self.splits_backward else 0.0
            return (full + new) * self.gradient_bytes + extra
        if self.job.sharding in ("gradients", "parameters") or not accumulated:
            reduced = self.shards if accumulated else done * self.shards / parameters.total
            return reduced * self.gradient_bytes + current * self.compute_bytes
        replaced = done - current if moment == "stage_done" else done
        remaining = full - replaced * (1 - self.shards / parameters.total)
        return remaining * self.gradient_bytes + current * self.compute_bytes

    def unaccumulated_gradients(self, point: SchedulePoint) -> float:
        """W of a split backward pass leaves gradients of blocks in the compute dtype, in addition to FSDP2's sum."""
        if self.compute_bytes == self.gradient_bytes:
            return 0.0
        rows = zip(self.stages, point.has_gradients, strict=True)
        parameters = [stage.parameters for stage, has in rows if has and not stage.layers.is_first]
        return sum(stage.total - stage.embedding - stage.head for stage in parameters) * self.compute_bytes

    @cached_property
    def all_unsharded(self) -> float:
        """Bytes of all units, unsharded."""
        embedding = sum(stage.parameters.embedding for stage in self.stages)
        return (self.dense + self.experts - embedding) * self.compute_bytes + embedding * self.embedding_bytes

    def unsharded_parameters(self, point: SchedulePoint, moment: str) -> tuple[float, float]:
        """Bytes of FSDP2's unsharded units, and of its communication: the prefetched unit and reduced gradients."""
        parameters, sharded = self.stages[point.stage].parameters, self.shard_ranks > 1
        in_backward, at_end = (
            moment in ("last_block", "first_block", "stage_done"),
            moment in ("first_block", "stage_done"),
        )
        embedding = parameters.embedding * self.embedding_bytes
        tied = embedding if self.job.model.tied_embeddings and not self.pipelined else 0.0
        block_numel = parameters.block + parameters.block_experts
        block = self.settings.segment * block_numel * self.compute_bytes + tied
        head = tied + parameters.head * self.compute_bytes
        prefetched = (embedding if at_end else parameters.block * self.compute_bytes) if sharded else 0.0
        if self.pipelined:
            if self.stays_unsharded:
                return self.all_unsharded, 0.0
            without_embedding = (parameters.total - parameters.embedding) * self.compute_bytes
            if len(self.stages) > 1:  # all units of a stage are unsharded together
                return without_embedding + embedding, prefetched
            if at_end:
                return without_embedding, prefetched
            return (head if moment == "loss_backward" else block), prefetched
        if moment.startswith("loss_") and not self.job.model.loss_in_head_unit and not self.stays_unsharded:
            return tied, prefetched if tied else 0.0
        last = moment == "last_block" or self.stages[point.stage].layers.layers == 1
        reduced = (parameters.head if last else parameters.block) if in_backward and sharded else 0.0
        if self.stays_unsharded:
            return self.all_unsharded, reduced * self.gradient_bytes
        if in_backward or moment == "block_forward":
            return block, prefetched + reduced * self.gradient_bytes
        return (head, head if sharded else 0.0) if moment == "loss_forward" else (head, prefetched)
