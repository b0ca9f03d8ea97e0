"""Pipeline parallelism: runs a rank's stages under torch's pipeline schedules.

Every rank of a pipeline reads the same samples: the first stage uses the tokens, the last stage the labels, and all
stages use the document boundaries. Gradients accumulate unsharded over the micro-batches and are reduced over the
data-parallel ranks once, at the end of the step, whatever `shard` says. The step divides the loss by the global token
count, so the schedule must not scale gradients again (`scale_grads=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from meshwright.parallel.mesh import Meshes
from meshwright.parallel.parallel_model import InFlightTracker, ParallelModel, PassHooks
from meshwright.parallel.pipeline_parallel.stages import TIED_COPIES, Stage, StagePlan, TiedWeight
from meshwright.topology.schedules import SCHEDULES
from meshwright.torch_private import StageWithFilteredP2P


class TrackedStage(StageWithFilteredP2P):
    """torch's `PipelineStage`, which reports its phases and micro-batches to an `InFlightTracker`."""

    in_flight: InFlightTracker

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.in_flight.enter("forward")
        self.in_flight.add(self.stage_index, 1)
        output = super().forward_one_chunk(*args, **kwargs)
        self.in_flight.enter("sync")
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.in_flight.enter("backward")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.in_flight.add(self.stage_index, -1)
        self.in_flight.enter("sync")

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.in_flight.enter("backward")
        super().backward_weight_one_chunk(*args, **kwargs)
        self.in_flight.add(self.stage_index, -1)
        self.in_flight.enter("sync")


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
        plan: StagePlan,
        meshes: Meshes,
        device: torch.device,
        tied: bool,
    ) -> None:
        super().__init__(module)
        assert meshes.dense_mesh is not None
        self.stages, self.plan, self.device = stages, plan, device
        self.group = meshes.dense_mesh.get_group("pipeline")
        self.tie = TiedWeight(module, plan, self.group) if tied else None
        self.groups = next(iter(stages.values())).groups
        self.has_loss = plan.last_stage in stages
        self.tied_copies = (
            frozenset(TIED_COPIES) if self.tie is not None and self.tie.tied_copy is not None else frozenset()
        )
        self.in_flight = InFlightTracker()
        self.scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss
        self.tracked_stages = [self._stage(index) for index in sorted(stages)]
        schedule = SCHEDULES[plan.schedule]
        self.schedule = getattr(pipelining, schedule.torch_class)(
            self.tracked_stages[0] if schedule.single_stage else self.tracked_stages,
            plan.micro_batches,
            loss_fn=lambda output, _labels: self.scale_loss(output.sum()),
            scale_grads=False,
        )

    def _stage(self, index: int) -> TrackedStage:
        """Builds a stage with given shapes; torch would otherwise infer them by a pass through the model."""
        plan = self.plan
        hidden = torch.empty(plan.hidden_shape, dtype=plan.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(plan.hidden_shape[:2], dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=plan.dtype, device="meta", requires_grad=True)
        stage = TrackedStage(
            self.stages[index].module,
            index,
            plan.placement.stage_count,
            self.device,
            input_args=(tokens if index == 0 else hidden,),
            output_args=(loss if index == plan.last_stage else hidden,),
            group=self.group,
        )
        stage.in_flight = self.in_flight
        return stage

    def forward_backward(self, micro_batches: Sequence[tuple[Tensor, ...]], hooks: PassHooks) -> InFlightTracker:
        """Runs all micro-batches in the order of the schedule."""
        self.in_flight, self.scale_loss = InFlightTracker(hooks.enter), hooks.scale_loss
        with self.micro_step(last=True):
            for stage in self.tracked_stages:
                stage.in_flight = self.in_flight
                assert isinstance(stage.submod, Stage)
                stage.submod.autocast = hooks.autocast
            tokens, *rest = (torch.cat(column) for column in zip(*micro_batches, strict=True))
            options = dict(zip(("labels", "documents"), rest, strict=False))
            args = (tokens,) if 0 in self.stages else ()
            hooks.enter("sync")  # every stage but the first waits for its first micro-batch
            with unwrap_stage_errors():
                self.schedule.step(*args, target=rest[0], return_outputs=False, **options)
            if self.tie is not None:
                self.tie.sum_gradients()
        return self.in_flight

    def forward_loss(self, *inputs: Tensor) -> Tensor:
        """Runs the stages one after another. The rank of the last stage returns the loss, the others return zero."""
        tokens, labels, *rest = inputs
        x, total = tokens, torch.zeros((), dtype=self.plan.dtype, device=tokens.device)
        for index in sorted(self.stages):
            if index and (source := self.plan.rank_of_stage(index - 1)) != self.plan.rank:
                shape = (len(tokens), *self.plan.hidden_shape[1:])
                x = torch.empty(shape, dtype=self.plan.dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=source)
            x = self.stages[index].module(x, labels, *rest)
            if index == self.plan.last_stage:
                total = x.sum()
            elif (target := self.plan.rank_of_stage(index + 1)) != self.plan.rank:
                dist.send(x.contiguous(), group=self.group, group_dst=target)
        return total

    def broadcast_buffers(self) -> None:
        for stage in self.stages.values():
            stage.broadcast_buffers()

    def after_update(self) -> None:
        if self.tie is not None:
            self.tie.broadcast_value()

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        received = (("communication", buffer) for stage in self.tracked_stages for buffer in stage.receive_buffers())
        return chain(received, chain.from_iterable(stage.internal_tensors() for stage in self.stages.values()))

    def reshard(self) -> None:
        for stage in self.stages.values():
            stage.reshard()
