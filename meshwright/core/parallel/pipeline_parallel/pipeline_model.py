"""Pipeline parallelism: runs a rank's stages under torch's pipeline schedules.

Every rank of a pipeline reads the same samples: the first stage uses the inputs, the last stage the targets, and all
stages what their blocks get beside the hidden states. Gradients accumulate unsharded over the micro-batches and are
reduced over the data-parallel ranks once, at the end of the step, whatever `shard` says. The step divides the loss by
the global token count, so the schedule must not scale gradients again (`scale_grads=False`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from meshwright.base.topology.schedules import SCHEDULES
from meshwright.core.parallel.mesh import Meshes
from meshwright.core.parallel.parallel_model import Autocast, InFlightTracker, ParallelModel, PassHooks
from meshwright.core.parallel.pipeline_parallel.stages import PipelineStages, StagePlan
from meshwright.core.parallel.pipeline_parallel.stand_ins import ModelTrace, StagePass, TensorShape
from meshwright.core.torch_private import StageWithFilteredP2P, initialize_stages
from meshwright.errors import ConfigError


class TrackedStage(StageWithFilteredP2P):
    """torch's `PipelineStage`, which reports its phases and micro-batches to an `InFlightTracker`."""

    in_flight: InFlightTracker

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.in_flight.begin("forward", self.stage_index, fwd_chunk_id)
        self.in_flight.add(self.stage_index, 1)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.in_flight.enter("sync")
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.in_flight.begin("backward", self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.in_flight.add(self.stage_index, -1)
        self.in_flight.enter("sync")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.in_flight.begin("backward", self.stage_index, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.in_flight.add(self.stage_index, -1)
        self.in_flight.enter("sync")


def writes_in_place(module: nn.Module) -> bool:
    return any(getattr(child, "inplace", False) for child in module.modules())


@contextmanager
def unwrap_stage_errors() -> Iterator[None]:
    """Raises the original error of a stage. torch wraps it in a RuntimeError, but its type decides which rank failed:
    out-of-memory is this rank's failure, a lost peer is not.
    """
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


class PipelineModel(ParallelModel):
    """The pipeline stages of this rank, each parallelized over data by itself. `module` contains all of them under the
    parameter names of the full model.
    """

    interleaves_backward = True

    def __init__(
        self,
        module: nn.Module,
        stages: dict[int, ParallelModel],
        divided: PipelineStages,
        plan: StagePlan,
        meshes: Meshes,
        device: torch.device,
        sequence_shards: int,
    ) -> None:
        super().__init__(module)
        assert meshes.dense_mesh is not None
        self.stages, self.plan, self.device = stages, plan, device
        self.divided = divided
        self.sequence_shards = sequence_shards
        """ranks that have parts of the hidden states' sequence (tensor parallelism)"""
        self.group = meshes.dense_mesh.get_group("pipeline")
        self.groups = next(iter(stages.values())).groups
        self.has_loss = plan.last_stage in stages
        self.stage_blocks = plan.placement.stages
        self.tied_copies = frozenset(tied.copy_name for tied in divided.tied if tied.tied_copy is not None)
        self.in_flight = InFlightTracker()
        self.scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss
        self.tracked_stages: list[TrackedStage] = []
        self.schedule: Any = None
        self.scheduled: tuple[tuple[TensorShape, ...], int] | None = None
        """the shapes and the number of the micro-batches that the schedule was built for"""
        for stage in divided.stages.values():
            stage.fill_vacancies(divided.tracer)

    def _trace(self, batch: tuple[Tensor, ...], autocast: Autocast) -> ModelTrace:
        """Prepares the stages for micro-batches of these shapes."""
        trace = self.divided.tracer.trace(batch, autocast)
        for index, stage in self.divided.stages.items():
            stage.current[:] = [StagePass(self.device, trace, writes_in_place=writes_in_place(stage))]
            stage.output = self._output(trace, index)
            stage.autocast = autocast
        return trace

    def _input(self, trace: ModelTrace, stage: int) -> TensorShape:
        """The hidden states that a stage of this rank receives."""
        return self._local(trace.block_inputs[self.plan.placement.stages[stage][0]])

    def _output(self, trace: ModelTrace, stage: int) -> TensorShape:
        if stage == self.plan.last_stage:
            return replace(trace.loss, shape=(1,))
        hidden = trace.block_results[self.plan.placement.stages[stage][-1]].hidden
        assert hidden is not None
        return self._local(hidden)

    def _local(self, hidden: TensorShape) -> TensorShape:
        if self.sequence_shards == 1:
            return hidden
        batch, sequence, *rest = hidden.shape
        return replace(hidden, shape=(batch, sequence // self.sequence_shards, *rest))

    def _build_schedule(self, trace: ModelTrace, micro_batches: int) -> None:
        """Builds the schedule with given shapes; torch would otherwise infer them by a pass through the model."""
        self.tracked_stages = [
            TrackedStage(
                self.stages[index].module,
                index,
                self.plan.placement.stage_count,
                self.device,
                input_args=(self._input(trace, index).on_meta(),) if index else (),
                output_args=(self._output(trace, index).on_meta(),),
                group=self.group,
            )
            for index in sorted(self.stages)
        ]
        schedule = SCHEDULES[self.plan.schedule]
        self.schedule = getattr(pipelining, schedule.torch_class)(
            self.tracked_stages[0] if schedule.single_stage else self.tracked_stages,
            micro_batches,
            loss_fn=lambda output, _targets: self.scale_loss(output.sum()),
            scale_grads=False,
        )

    def forward_backward(self, micro_batches: Sequence[tuple[Tensor, ...]], hooks: PassHooks) -> InFlightTracker:
        """Runs all micro-batches in the order of the schedule. Every stage gets all tensors of its micro-batch."""
        self.in_flight, self.scale_loss = InFlightTracker(hooks.enter), hooks.scale_loss
        for stage_model in self.stages.values():
            stage_model.accumulate(len(micro_batches))
        self._schedule(micro_batches, hooks.autocast)
        with self.micro_step(last=True):
            for stage in self.tracked_stages:
                stage.in_flight = self.in_flight
            columns = [torch.cat(column) for column in zip(*micro_batches, strict=True)]
            hooks.enter("sync")  # every stage but the first waits for its first micro-batch
            with unwrap_stage_errors():
                self.schedule.step(target=columns[-1], return_outputs=False, **named_columns(columns))
            for stage_model in self.stages.values():
                stage_model.reduce_scalars()
            for tied in self.divided.tied:
                tied.sum_gradients(self.group)
        return self.in_flight

    def _schedule(self, micro_batches: Sequence[tuple[Tensor, ...]], autocast: Autocast) -> None:
        """Prepares the stages, and builds the schedule unless the last one was for as many equal micro-batches."""
        trace = self._trace(micro_batches[0], autocast)
        shapes = require_equal_shapes(micro_batches)
        if self.scheduled != (shapes, len(micro_batches)):
            self._build_schedule(trace, len(micro_batches))
            self.scheduled = shapes, len(micro_batches)

    def prepare_schedule(self, micro_batches: Sequence[tuple[Tensor, ...]], autocast: Autocast) -> None:
        """Builds the schedule of such a step, and the buffers that its stages receive into."""
        self._schedule(micro_batches, autocast)
        initialize_stages(self.schedule, self.tracked_stages, named_columns(micro_batches[0]), micro_batches[0][-1])

    def forward_loss(self, *inputs: Tensor) -> Tensor:
        """Runs the stages one after another. The rank of the last stage returns the loss, the others return zero."""
        trace = self._trace(inputs, nullcontext)
        hidden: Tensor | None = None
        total = torch.zeros((), dtype=trace.loss.dtype, device=self.device)
        for index in sorted(self.stages):
            if index and (source := self.plan.rank_of_stage(index - 1)) != self.plan.rank:
                expected = self._input(trace, index)
                hidden = torch.empty(expected.shape, dtype=expected.dtype, device=self.device)
                dist.recv(hidden, group=self.group, group_src=source)
            result = self.stages[index].module(hidden, **named_columns(inputs))
            if index == self.plan.last_stage:
                total = result.sum()
            elif (target := self.plan.rank_of_stage(index + 1)) != self.plan.rank:
                dist.send(result.contiguous(), group=self.group, group_dst=target)
            hidden = result
        return total

    def broadcast_buffers(self) -> None:
        for stage in self.stages.values():
            stage.broadcast_buffers()

    def after_update(self) -> None:
        for tied in self.divided.tied:
            tied.broadcast_value(self.group)

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        received = (("communication", buffer) for stage in self.tracked_stages for buffer in stage.receive_buffers())
        return chain(received, chain.from_iterable(stage.internal_tensors() for stage in self.stages.values()))

    def pop_block_calls(self) -> int:
        return zlib.crc32(repr([stage.pop_block_calls() for stage in self.stages.values()]).encode())

    def reshard(self) -> None:
        for stage in self.stages.values():
            stage.reshard()


def named_columns(columns: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch as keyword arguments, which schedules pass to every stage."""
    return {f"tensor_{index}": column for index, column in enumerate(columns)}


def require_equal_shapes(micro_batches: Sequence[tuple[Tensor, ...]]) -> tuple[TensorShape, ...]:
    first, *others = (tuple(map(TensorShape.of, batch)) for batch in micro_batches)
    for other in others:
        if other != first:
            found = next((a.shape, b.shape) for a, b in zip(first, other, strict=True) if a != b)
            raise ConfigError(
                f"the micro-batches of a step have different shapes, {found[0]} and {found[1]}, and the stages of a "
                "pipeline exchange tensors of one shape",
                "try to pad all samples to one length, or layout.pipeline = 1",
            )
    return first
