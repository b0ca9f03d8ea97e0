"""The operations of one pass of one micro-batch through one pipeline stage.

| pass | operations per block | memory |
|---|---|---|
| F | wait for the unit's parameters, prefetch the next, collectives, compute, reshard | keeps what backward needs |
| B | the same with recomputation; then reduce the unit's gradients | frees it, unit by unit; leaves gradients |
| I | as B, for the gradient of the stage's input only | frees nothing, keeps gradients of matmul outputs |
| W | the weight gradients that I left | frees everything |

FSDP2 has the unit in use and the prefetched one unsharded. It copies the gradients of a unit into one flat tensor,
reduce-scatters it, and frees the copy when the next unit is reduced; the gradient of the unit's last parameter lives
until then. Activations, logits and temporary tensors are those of `activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.cost.terms.activations import (
    ActivationSettings,
    BlockActivations,
    block_activations,
    hidden_state_bytes,
    outer_activations,
)
from meshwright.planner.cost.terms.head_activations import head_activations
from meshwright.planner.cost.terms.layer_time import LayerShape, LayerTime, embedding_time, head_time, layer_time
from meshwright.planner.cost.trace.activation_messages import ActivationMessages, Messages
from meshwright.planner.cost.trace.data_parallel import DataParallel
from meshwright.planner.cost.trace.operations import (
    ACTIVATIONS,
    LOGITS,
    Allocate,
    Compute,
    Operation,
    Operations,
    Repeat,
)
from meshwright.planner.cost.trace.schedule_passes import PassKind
from meshwright.planner.cost.units.rank_units import RankStage, Unit
from meshwright.planner.workload.planned_job import PlannedJob


class StagePart(NamedTuple):
    """A part of a stage that runs at once: the modules before the blocks, equal blocks, or the modules after them."""

    repeats: int
    units: tuple[Unit, ...]
    """its FSDP units, which are unsharded together"""
    time: LayerTime
    messages: Messages
    block: BlockActivations | None
    """None for the modules around the blocks"""
    is_head: bool = False
    together: int = 1
    """blocks that activation checkpointing recomputes together, and that are unsharded together for it"""


Body = Callable[[StagePart, PassKind], Iterator[Operation]]
"""The operations of one part, without those of its parameters."""


class StagePasses:
    """Builds the passes of one stage."""

    def __init__(
        self,
        job: PlannedJob,
        stage: RankStage,
        settings: ActivationSettings,
        shape: LayerShape,
        messages: ActivationMessages,
        data_parallel: DataParallel,
    ) -> None:
        self.job, self.stage, self.settings, self.shape = job, stage, settings, shape
        self.messages, self.data = messages, data_parallel
        layers, trainer = stage.layers, job.trainer
        self.residual = hidden_state_bytes(job.model, settings)
        self.head = head_activations(job.model, settings) if layers.is_last else None
        pipelined = job.layout.pipeline > 1
        keeps_output = trainer.keeps_stage_outputs and not layers.next_on_rank
        self.output = self.residual if keeps_output and not layers.is_last else 0.0
        self.received = self.residual if trainer.torch_native and not layers.is_first else 0.0
        several = pipelined and not SCHEDULES[job.schedule].single_stage and trainer.torch_native
        sends_output = several and not (layers.is_last or layers.next_on_rank)
        self.sends_gradient = several and not (layers.is_first or layers.previous_on_rank)
        self.sent = self.residual * (sends_output + self.sends_gradient)

    @cached_property
    def parts(self) -> list[StagePart]:
        """In the order of forward."""
        stage, parts = self.stage, []
        units: tuple[Unit, ...]
        if stage.layers.is_first:
            units = (stage.before,) if stage.before else ()
            messages = self.messages.embedding(stage.embedding_frozen)
            parts.append(StagePart(1, units, embedding_time(self.shape), messages, None))
        for run in stage.runs:
            units = (run.unit, run.experts) if run.experts else (run.unit,)
            shape, settings = self.shape, self.settings
            if run.trained is not None:
                shape, settings = replace(shape, trained=run.trained), replace(settings, trained=run.trained)
            time = layer_time(shape, run.moe)
            block = block_activations(self.job.model, settings, run.moe)
            together = min(self.settings.segment, stage.layers.layers)
            messages = self.messages.block(run.moe, time, run.tensor)
            parts.append(StagePart(run.count, units, time, messages, block, together=together))
        if stage.layers.is_last:
            units = (stage.after,) if stage.after else ()
            parts.append(StagePart(1, units, head_time(self.shape), self.messages.head(), None, is_head=True))
        return parts

    def operations(self, kind: PassKind) -> Operations:
        if kind.op == "R":
            return tuple(self.data.release(self.stage, kind))
        passes = {"F": self.forward, "B": self.backward, "I": self.input_backward, "W": self.weight_backward}
        return tuple(without_empty(passes[kind.op](kind)))

    def forward(self, kind: PassKind) -> Iterator[Operation]:
        outer = outer_activations(self.job.model, self.settings) if self.stage.layers.is_first else 0.0
        yield Allocate(ACTIVATIONS, outer - self.received)
        yield from self.data.begin(self.stage, kind)
        yield from self.with_prefetch(self.parts, kind, self.forward_of)
        if self.head:
            yield Allocate(ACTIVATIONS, self.head.saved)
            yield Allocate(LOGITS, self.head.logits + self.head.forward_peak)
            yield Allocate(LOGITS, -self.head.forward_peak)
        yield from self.data.end_forward(self.stage, kind)
        yield Allocate(ACTIVATIONS, self.output - self.cast_weights)
        if not (self.stage.layers.is_last or self.stage.layers.next_on_rank):
            yield self.messages.send()

    @cached_property
    def cast_weights(self) -> float:
        """Copies of weights that autocast makes in checkpointed blocks, and keeps to the end of forward."""
        if self.job.activation_checkpoint == "none":
            return 0.0
        return sum(part.repeats * part.block.autocast_weights for part in self.parts if part.block)

    def forward_of(self, part: StagePart, kind: PassKind) -> Iterator[Operation]:
        del kind
        yield from part.messages.forward
        yield Compute("forward", part.time.forward)
        if part.block is not None:
            cast = part.block.autocast_weights if self.job.activation_checkpoint != "none" else 0.0
            yield Allocate(ACTIVATIONS, part.block.saved + part.block.forward_peak + cast)
            yield Allocate(ACTIVATIONS, -part.block.forward_peak)

    def with_prefetch(self, parts: Sequence[StagePart], kind: PassKind, body: Body) -> Iterator[Operation]:
        """The parts in order; each is unsharded while the one before computes."""
        if parts:
            yield from self.data.prefetch(parts[0].units, kind)
        for part, following in pairwise([*parts, None]):
            assert part is not None
            equal = part.repeats - 1  # the last block is followed by other units
            if equal and self.data.holds_flat_gradients(kind):  # the first block finds those of another unit
                yield from self.one(part, part.units, kind, body)
                equal -= 1
            if equal:
                yield Repeat(equal, tuple(without_empty(self.one(part, part.units, kind, body))))
            yield from self.one(part, following.units if following else (), kind, body)

    def one(self, part: StagePart, behind: tuple[Unit, ...], kind: PassKind, body: Body) -> list[Operation]:
        """One module, or one of several equal blocks, and the gathering of the units behind it."""
        together = part.together if kind.op == "B" else 1
        return [
            *self.data.unshard(part.units, behind, kind, together),
            *body(part, kind),
            *self.data.reshard(part.units, kind, together),
        ]

    def backward(self, kind: PassKind) -> Iterator[Operation]:
        yield from self.data.begin(self.stage, kind)
        yield from self.with_prefetch(self.parts[::-1], kind, self.backward_of)
        if not (self.stage.layers.is_first or self.stage.layers.previous_on_rank):
            yield self.messages.send()
        outer = outer_activations(self.job.model, self.settings) if self.stage.layers.is_first else 0.0
        yield Allocate(ACTIVATIONS, self.sent + self.received - outer - self.output)
        yield from self.data.end_backward(self.stage, kind)

    def backward_of(self, part: StagePart, kind: PassKind) -> Iterator[Operation]:
        if part.is_head and self.head:
            yield Allocate(LOGITS, self.head.backward_peak)
            yield Allocate(LOGITS, self.head.logit_gradient - self.head.backward_peak - self.head.logits)
        yield from part.messages.recomputed
        yield Compute("recompute", part.time.recompute)
        if part.block is not None:
            yield Allocate(ACTIVATIONS, part.block.backward_peak)
        yield from self.data.first_gradients(part.units, kind)
        yield from part.messages.backward
        yield Compute("backward", part.time.backward)
        if part.block is not None:
            yield Allocate(ACTIVATIONS, -part.block.backward_peak - part.block.saved)
        yield from self.data.gradients(part.units, kind, self.residual)
        if part.is_head and self.head:
            yield Allocate(LOGITS, -self.head.logit_gradient)
            yield Allocate(ACTIVATIONS, -self.head.saved)

    def input_backward(self, kind: PassKind) -> Iterator[Operation]:
        """The first stage needs no input gradient, and leaves everything to W."""
        yield from self.data.begin(self.stage, kind)
        yield from self.with_prefetch(self.parts[::-1], kind, self.input_backward_of)
        if not self.stage.layers.is_first:
            yield Allocate(ACTIVATIONS, 4 * self.residual)  # the backward pass of a norm is the last one of a block
            yield Allocate(ACTIVATIONS, self.residual * self.sends_gradient - 4 * self.residual)
            yield Allocate(LOGITS, -self.head.logits if self.head else 0.0)
        if not (self.stage.layers.is_first or self.stage.layers.previous_on_rank):
            yield self.messages.send()

    def input_backward_of(self, part: StagePart, kind: PassKind) -> Iterator[Operation]:
        del kind
        is_first = self.stage.layers.is_first
        if part.is_head and self.head and not is_first:
            yield Allocate(LOGITS, self.head.backward_peak)
            yield Allocate(LOGITS, -self.head.backward_peak)
            yield Allocate(ACTIVATIONS, self.head.deferred)
        yield from part.messages.recomputed
        yield Compute("recompute", part.time.recompute)
        yield from part.messages.backward
        yield Compute("backward", part.time.backward - part.time.weight_gradient)
        if part.block is not None and not is_first:
            yield Allocate(ACTIVATIONS, part.block.input_backward_peak)
            yield Allocate(ACTIVATIONS, part.block.deferred - part.block.input_backward_peak)

    def weight_backward(self, kind: PassKind) -> Iterator[Operation]:
        yield from self.data.begin(self.stage, kind)
        yield from self.with_prefetch(self.parts[::-1], kind, self.weight_backward_of)
        layers, saved = self.stage.layers, 0.0
        if layers.is_first:
            saved = outer_activations(self.job.model, self.settings)
        else:
            saved = sum(part.repeats * (part.block.saved + part.block.deferred) for part in self.parts if part.block)
            saved += self.head.saved + self.head.deferred if self.head else 0.0
        sent = self.sent - self.residual * self.sends_gradient
        yield Allocate(ACTIVATIONS, sent + self.received - self.output - saved)
        yield from self.data.end_backward(self.stage, kind)

    def weight_backward_of(self, part: StagePart, kind: PassKind) -> Iterator[Operation]:
        """In the first stage W is a full backward pass to memory, since I has freed and left nothing."""
        yield Compute("backward", part.time.weight_gradient)
        is_first = self.stage.layers.is_first
        if part.is_head and self.head and is_first:
            yield Allocate(LOGITS, self.head.backward_peak)
            yield Allocate(LOGITS, -self.head.backward_peak - self.head.logits)
            yield Allocate(ACTIVATIONS, -self.head.saved)
        if part.block is not None and is_first:
            yield Allocate(ACTIVATIONS, part.block.backward_peak)
        yield from self.data.first_gradients(part.units, kind)
        if part.block is not None and is_first:
            yield Allocate(ACTIVATIONS, -part.block.backward_peak - part.block.saved)
        yield from self.data.gradients(part.units, kind)


def without_empty(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Leaves out allocations of no bytes."""
    for operation in operations:
        if type(operation) is not Allocate or operation.size:
            yield operation
