"""The operations of data parallelism in a pass: FSDP units are gathered and resharded, gradients exist and are reduced.

| gradients | where they are |
|---|---|
| buffers | allocated throughout: DDP's buckets, Megatron's buffers |
| local | allocated by the first backward pass, and accumulated: one rank, tensor parallelism, FSDP2 and ZeRO-2 in a
pipeline; of the latter, the shard of a stage remains after its last backward pass |
| units | FSDP2 without a pipeline: one unit at a time, then its reduced shard |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.base.hardware.links import GroupPlacement, collective_seconds
from meshwright.planner.cost.trace.operations import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    UNSHARDED,
    Allocate,
    Communicate,
    Operation,
    Repeat,
    Wait,
)
from meshwright.planner.cost.trace.schedule_passes import PassKind
from meshwright.planner.cost.units.rank_units import RankStage, Unit
from meshwright.planner.workload.planned_job import PlannedJob

GATHER, REDUCE = "gather", "reduce"


@dataclass(frozen=True)
class GradientBytes:
    """Bytes per element of gradients."""

    kept: float
    """of gradients that are accumulated, or were reduced"""
    computed: float
    """of gradients that a backward pass has just computed, with FSDP2"""
    reduced: float
    """in reductions over data-parallel ranks"""
    partial: float
    """in reductions over the tensor axis"""


@dataclass(frozen=True)
class DataParallelPlan:
    """How a job gathers parameters and reduces gradients."""

    unshards: bool
    """FSDP2: units are copied when they are unsharded, and the copies are counted"""
    gradients: Literal["buffers", "local", "units"]
    shards_gradients: bool
    """gradients are reduced in every micro-step without a pipeline (ZeRO-2 and ZeRO-3)"""
    pipelined: bool
    overlaps: bool
    """collectives run beside the computation"""
    all_reduces: bool
    """gradients of a sharded optimizer are all-reduced, not reduce-scattered"""
    ranks_after_forward: int = 0
    one_adapter: bool = False
    """gathers of units use one network adapter per node"""


class DataParallel:
    """Builds the operations of one pass after the other."""

    def __init__(self, job: PlannedJob, plan: DataParallelPlan, sizes: GradientBytes, tensor: GroupPlacement) -> None:
        self.job, self.plan, self.sizes, self.tensor = job, plan, sizes, tensor
        self.held = 0.0
        """bytes of the flat gradients that the last reduction has not freed yet"""

    # Parameters.

    def gather(self, unit: Unit, kind: PassKind) -> Iterator[Operation]:
        group = unit.group
        if group.shards.ranks == 1:
            return
        axis, placement = group.shard_axis, group.shards
        if kind.gathers == "resharded" and unit.resharded:
            axis, placement = "other", GroupPlacement(self.plan.ranks_after_forward, self.plan.ranks_after_forward)
        elif self.plan.one_adapter and placement.nodes > 1:
            placement = GroupPlacement(placement.ranks, 1)
        yield self.communicate(axis, "all_gather", unit.gathered, placement, GATHER)

    def communicate(
        self,
        axis: str,
        collective: str,
        message_bytes: float,
        placement: GroupPlacement,
        queue: str,
        follows: bool = False,
    ) -> Communicate:
        seconds = collective_seconds(self.job.cluster, collective, message_bytes, placement)
        queue = queue if self.plan.overlaps else ""
        return Communicate(axis, collective, message_bytes, 1, placement, seconds, 0.0, queue, follows)

    def begin(self, stage: RankStage, kind: PassKind) -> Iterator[Operation]:
        self.held = 0.0
        if kind.gathers:
            units = [(1, stage.root)] if stage.root else []
            units += stage.units if kind.whole else []
            for count, unit in units:
                operations = (*self.gather(unit, kind), *self.copy(unit, kind))
                yield from operations if count == 1 else (Repeat(count, operations),)
            if units:
                yield Wait(GATHER)
        if stage.root is not None and kind.op == "B" and self.plan.gradients != "buffers" and not self.in_place(kind):
            yield Allocate(GRADIENTS, stage.root.early * self.new_bytes(stage.root))

    def copy(self, unit: Unit, kind: PassKind) -> Iterator[Operation]:
        if self.plan.unshards:
            yield Allocate(UNSHARDED, unit.unsharded)
            if kind.gathers == "resharded":
                yield Allocate(UNSHARDED, -unit.resharded)

    def prefetch(self, units: Sequence[Unit], kind: PassKind) -> Iterator[Operation]:
        """Gathers units early. Experts that are divided over ranks take no memory yet: the block gathers them."""
        if kind.gathers and not kind.whole:
            for unit in units:
                yield from self.gather(unit, kind)
            yield Allocate(COMMUNICATION, self.prefetched(units))

    def prefetched(self, units: Sequence[Unit]) -> float:
        is_sharded = self.plan.unshards and units and units[0].group.shards.ranks > 1
        return units[0].unsharded if is_sharded else 0.0

    def unshard(
        self, units: Sequence[Unit], following: Sequence[Unit], kind: PassKind, together: int
    ) -> Iterator[Operation]:
        """Waits for the units, and gathers those that follow. So many equal blocks are unsharded together."""
        if not kind.gathers or kind.whole:
            return
        yield Wait(GATHER)
        yield Allocate(COMMUNICATION, -self.prefetched(units))
        for unit in units:
            yield from self.copy(unit, kind)
            if self.plan.unshards and not kind.keeps:
                yield Allocate(UNSHARDED, (together - 1) * unit.unsharded)
        yield from self.prefetch(following, kind)

    def reshard(self, units: Sequence[Unit], kind: PassKind, together: int = 1) -> Iterator[Operation]:
        if self.plan.unshards and not kind.keeps:
            for unit in reversed(units):
                if kind.gathers and not kind.whole:
                    yield Allocate(UNSHARDED, (1 - together) * unit.unsharded)
                if kind.op == "F":
                    yield Allocate(UNSHARDED, unit.resharded)
                yield Allocate(UNSHARDED, -unit.unsharded)

    def end_forward(self, stage: RankStage, kind: PassKind) -> Iterator[Operation]:
        if stage.root is not None:
            yield from self.reshard([stage.root], kind)

    def release(self, stage: RankStage, kind: PassKind) -> Iterator[Operation]:
        """The stage is resharded between two passes."""
        for count, unit in stage.units if self.plan.unshards else ():
            yield Allocate(UNSHARDED, -count * (unit.resharded if kind.gathers == "resharded" else unit.unsharded))

    # Gradients.

    def computed_bytes(self, unit: Unit) -> float:
        """Bytes per element of a gradient that a backward pass has just computed: autograd gives it the dtype of the
        unsharded parameter.
        """
        return unit.computed or self.sizes.computed

    def new_bytes(self, unit: Unit) -> float:
        """Bytes per element of a gradient that a backward pass adds."""
        return self.computed_bytes(unit) if self.plan.gradients == "units" else self.sizes.kept

    def in_place(self, kind: PassKind) -> bool:
        """Whether the gradients of the pass are added to unsharded ones of earlier micro-batches."""
        return kind.accumulates and not (self.plan.gradients == "units" and self.plan.shards_gradients)

    def reduces(self, kind: PassKind) -> bool:
        return kind.last or (self.plan.shards_gradients and not self.plan.pipelined)

    def holds_flat_gradients(self, kind: PassKind) -> bool:
        """Whether the flat gradients of a unit live until the next one is reduced in the same pass."""
        return kind.op == "B" and self.plan.gradients == "units" and self.reduces(kind)

    def first_gradients(self, units: Sequence[Unit], kind: PassKind) -> Iterator[Operation]:
        """The first gradients of a block, when its backward pass is at its peak."""
        if self.plan.gradients == "buffers":
            return
        for unit in units:
            if not self.in_place(kind):
                yield Allocate(GRADIENTS, unit.first * self.new_bytes(unit))
            elif self.plan.gradients == "units":
                yield Allocate(ACTIVATIONS, unit.first * self.computed_bytes(unit))

    def gradients(self, units: Sequence[Unit], kind: PassKind, residual: float = 0.0) -> Iterator[Operation]:
        """The other gradients of a block; its units are reduced in the reverse order of their use."""
        for unit in reversed(units):
            if self.plan.gradients != "buffers":
                if not self.in_place(kind):
                    yield Allocate(GRADIENTS, (unit.numel - unit.first) * self.new_bytes(unit))
                elif self.plan.gradients == "units":
                    yield Allocate(ACTIVATIONS, -unit.first * self.computed_bytes(unit))
            if self.plan.gradients != "units":
                if self.reduces(kind) and not (self.plan.pipelined and self.plan.unshards):
                    yield from self.reduction(unit, kind)
                    if self.plan.gradients == "local" and self.plan.shards_gradients:
                        yield Allocate(GRADIENTS, (unit.shard - unit.numel) * self.sizes.kept)
            elif self.reduces(kind):
                yield Allocate(ACTIVATIONS, residual)
                yield from self.reduce_unit(unit, kind)
                yield Allocate(ACTIVATIONS, -residual)
            elif not kind.accumulates:
                yield Allocate(GRADIENTS, unit.numel * (self.sizes.kept - self.computed_bytes(unit)))

    def reduce_unit(self, unit: Unit, kind: PassKind) -> Iterator[Operation]:
        """FSDP2 copies the gradients into a flat tensor, and reduce-scatters it."""
        sizes = self.sizes
        unsharded = sizes.kept if self.in_place(kind) or self.plan.pipelined else self.computed_bytes(unit)
        yield Allocate(COMMUNICATION, -self.held)
        yield Allocate(COMMUNICATION, unit.padded * sizes.kept)
        yield from self.reduction(unit, kind)
        yield Allocate(GRADIENTS, -(unit.numel - unit.last) * unsharded)
        if not (kind.accumulates and not self.in_place(kind)):  # otherwise earlier micro-batches left a shard
            yield Allocate(GRADIENTS, unit.shard * sizes.kept)
        yield Allocate(GRADIENTS, -unit.last * unsharded)
        self.held = unit.padded * sizes.kept if unit.group.shards.ranks > 1 else 0.0
        if not self.held:
            yield Allocate(COMMUNICATION, -unit.padded * sizes.kept)

    def reduction(self, unit: Unit, kind: PassKind) -> Iterator[Operation]:
        """The collectives of a unit's gradients, of which a frozen unit has none."""
        if not unit.padded:
            return
        group, message = unit.group, unit.padded * self.sizes.reduced
        if unit.partial:
            partial = unit.partial * self.sizes.partial
            yield self.communicate("tensor", "all_reduce", partial, self.tensor, REDUCE)
        if group.shards.ranks > 1:
            collective = "all_reduce" if self.plan.all_reduces else "reduce_scatter"
            one_adapter = self.plan.one_adapter and group.shards.nodes > 1
            placement = GroupPlacement(group.shards.ranks, 1) if one_adapter else group.shards
            yield self.communicate(group.shard_axis, collective, message, placement, REDUCE, unit.partial > 0)
        if group.replicas.ranks > 1 and kind.last:
            shards = group.shards.ranks
            message = unit.padded // shards * self.sizes.reduced if shards > 1 else message
            follows = shards > 1 or unit.partial > 0
            yield self.communicate(group.replicate_axis, "all_reduce", message, group.replicas, REDUCE, follows)

    def end_backward(self, stage: RankStage, kind: PassKind) -> Iterator[Operation]:
        """The unit around all blocks comes last. A pipeline reduces its gradients, which are unsharded until then."""
        if stage.root is not None:
            root = stage.root
            if self.plan.gradients != "buffers" and not self.in_place(kind):
                yield Allocate(GRADIENTS, (root.numel - root.early) * self.new_bytes(root))
            if self.plan.gradients != "units":
                yield from self.reduction(root, kind) if self.reduces(kind) else ()
            elif self.reduces(kind):
                yield from self.reduce_unit(root, kind)
            elif not kind.accumulates:
                yield Allocate(GRADIENTS, root.numel * (self.sizes.kept - self.computed_bytes(root)))
            yield from self.reshard([root], kind)
        unaccumulated = self.unaccumulated(stage, kind)
        if kind.op == "W" and not kind.accumulates:
            yield Allocate(GRADIENTS, unaccumulated)
        if kind.last and self.plan.pipelined and self.plan.unshards:
            yield from self.reduce_stage(stage, kind)
            yield Allocate(GRADIENTS, -unaccumulated)
        yield Allocate(COMMUNICATION, -self.held)
        self.held = 0.0
        yield Wait(REDUCE)

    def unaccumulated(self, stage: RankStage, kind: PassKind) -> float:
        """W of a split backward pass leaves gradients of blocks in the compute dtype, in addition to FSDP2's sum."""
        if kind.op != "W" or stage.layers.is_first or not self.plan.unshards or self.sizes.computed == self.sizes.kept:
            return 0.0
        blocks = (unit.numel * run.count for run in stage.runs for unit in (run.unit, run.experts) if unit)
        return sum(blocks) * self.sizes.computed

    def reduce_stage(self, stage: RankStage, kind: PassKind) -> Iterator[Operation]:
        rows: list[tuple[int, tuple[Unit, ...]]] = [(1, (stage.before,))] if stage.before else []
        rows += [(run.count, (run.unit, run.experts) if run.experts else (run.unit,)) for run in stage.runs]
        rows += [(1, (stage.after,))] if stage.after else []
        for count, units in rows:
            for unit in units:
                yield from self.reduce_unit(unit, kind)
            if count > 1:
                repeated = tuple(operation for unit in units for operation in self.reduce_unit(unit, kind))
                yield Repeat(count - 1, repeated)
        for count, unit in stage.units:
            yield Allocate(UNSHARDED, -count * unit.unsharded)
