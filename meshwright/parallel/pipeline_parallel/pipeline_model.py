"""Pipeline parallelism: stages of blocks on torch's schedules, and what each rank did while they ran.

Every rank reads the same samples: the first stage takes the tokens, the last one the labels, and all of them know from
the tokens where documents end. A stage computes its gradients micro-batch by micro-batch and keeps them whole; ranks
that read other samples meet once a step, at its end, whatever `shard` divides. The loss is divided by the step, so the
schedule must not (`scale_grads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.config.parallelism import ScheduleName
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.pipeline_parallel.stages import TIED_COPIES, Stage, StagePlan, TiedWeight
from meshwright.topology.schedules import SINGLE
from meshwright.torch_private import StageWithFilteredP2P

SCHEDULES: dict[ScheduleName, type] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


@dataclass
class InFlightTracker:
    """What a rank does while a schedule runs. `enter` hears of every phase: between passes a rank waits."""

    enter: Callable[[str], object] = lambda _phase: None
    live: Counter[int] = field(default_factory=Counter)
    peak: Counter[int] = field(default_factory=Counter)
    """micro-batches whose activations each stage held at once, at most"""
    peak_total: int = 0
    """the same over all stages of the rank"""

    def internal_tensors(self, stage: int, change: int) -> None:
        self.live[stage] += change
        self.peak[stage] = max(self.peak[stage], self.live[stage])
        self.peak_total = max(self.peak_total, self.live.total())


class TrackedStage(StageWithFilteredP2P):
    """torch's stage, which tells its pace."""

    in_flight: InFlightTracker

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.in_flight.enter("forward")
        self.in_flight.internal_tensors(self.stage_index, 1)
        output = super().forward_one_chunk(*args, **kwargs)
        self.in_flight.enter("sync")
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.in_flight.enter("backward")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.in_flight.internal_tensors(self.stage_index, -1)
        self.in_flight.enter("sync")

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.in_flight.enter("backward")
        super().backward_weight_one_chunk(*args, **kwargs)
        self.in_flight.internal_tensors(self.stage_index, -1)
        self.in_flight.enter("sync")


@contextmanager
def unwrap_stage_errors() -> Iterator[None]:
    """torch wraps whatever is raised within a stage in an error of its own. What it was decides who is to blame: a full
    memory is this rank's failure, a lost neighbour is not.
    """
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


class PipelineModel(ParallelModel):
    """Stages of a pipeline on this rank, each spread over tokens by itself. `module` holds what all of them have, under
    the names of the whole model.
    """

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
        self.copies = frozenset(TIED_COPIES) if self.tie is not None and self.tie.tied_copy is not None else frozenset()
        self.in_flight = InFlightTracker()
        self.weigh: Callable[[Tensor], Tensor] = lambda loss: loss
        self.paced = [self._stage(index) for index in sorted(stages)]
        self.schedule = SCHEDULES[plan.schedule](
            self.paced[0] if plan.schedule in SINGLE else self.paced,
            plan.micro_batches,
            loss_fn=lambda output, _labels: self.weigh(output).sum(),
            scale_grads=False,
        )

    def _stage(self, index: int) -> TrackedStage:
        """Shapes are given: torch would find them out by a pass through the model."""
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

    def run(
        self,
        micro_batches: Sequence[tuple[Tensor, ...]],
        weigh: Callable[[Tensor], Tensor],
        enter: Callable[[str], object],
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> InFlightTracker:
        """Forward and backward of all micro-batches; `weigh` makes of each one's loss what its backward begins with."""
        self.in_flight = InFlightTracker(enter)
        for stage in self.paced:
            stage.in_flight = self.in_flight
            assert isinstance(stage.submod, Stage)
            stage.submod.autocast = autocast
        self.weigh = weigh
        tokens, *rest = (torch.cat(column) for column in zip(*micro_batches, strict=True))
        named = dict(zip(("labels", "documents"), rest, strict=False))
        enter("sync")  # all but the first stage wait for its first micro-batch
        with unwrap_stage_errors():
            self.schedule.step(*((tokens,) if 0 in self.stages else ()), target=rest[0], return_outputs=False, **named)
        if self.tie is not None:
            self.tie.sum_gradients()
        return self.in_flight

    def forward_loss(self, *inputs: Tensor) -> Tensor:
        """Stage after stage; only the last one's rank knows the loss."""
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
        received = (("communication", buffer) for stage in self.paced for buffer in stage.receive_buffers())
        return chain(received, chain.from_iterable(stage.internal_tensors() for stage in self.stages.values()))

    def reshard(self) -> None:
        for stage in self.stages.values():
            stage.reshard()
