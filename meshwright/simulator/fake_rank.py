"""One rank of a layout that does not exist: its model, its parallelism and its step, on tensors without content."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config import Batch, RunConfig
from meshwright.data.loader import MicroBatch
from meshwright.errors import ConfigError
from meshwright.models.init import build_on_meta
from meshwright.optim.adamw import AdamW
from meshwright.parallel.local_shard import LocalShard
from meshwright.parallel.materialize import Materializer
from meshwright.parallel.parallel_model import InFlightTracker, ParallelModel
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.pipeline_parallel.stages import StagePlan, stage_plan
from meshwright.parallel.tensor_parallel import decoder_parallel_spec
from meshwright.parallel.world import World
from meshwright.simulator.extrapolation import MemoryTimeline, StepTrace
from meshwright.simulator.fake_ddp import FakeDDP
from meshwright.simulator.uniform_routing import share_evenly
from meshwright.telemetry.memory_tracker import KINDS, UNINITIALIZED, MemoryTracker
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import PipelinePlacement
from meshwright.torch_private import FakeTensors, clear_dtensor_cache, init_fake_process_group, patched_for_simulation
from meshwright.trainer.precision import Precision
from meshwright.trainer.step import Step, StepContext, StepControl
from meshwright.trainer.step_counters import count_step

CLASSES = (*KINDS, UNINITIALIZED)
LR = 1e-3


@dataclass(frozen=True)
class StepSize:
    """How much of a rank's step is gone through: blocks of each of its stages, and micro-steps."""

    blocks: tuple[int, ...]
    micros: int


class MemoryTimelineTracker(MemoryTracker):
    """A memory ledger that keeps its whole course."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.course: MemoryTimeline = [("begin", [])]

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.course.append((phase, []))
        self._phase = phase
        self._settle()

    def _mark_peaks(self, kind: str, size: int) -> None:
        super()._mark_peaks(kind, size)
        self.course[-1][1].append(((kind, size), tuple(self._bytes[name] for name in CLASSES)))


class FakeStep(Step):
    """A step whose ranks agree without hearing of each other."""

    def _read_control(self, step: int, batches: list[MicroBatch], sums: Tensor) -> StepControl:  # noqa: ARG002
        return StepControl(tokens=1, bad_samples=0)

    def _seed(self, step: int) -> None:
        """Nothing is drawn, and the caller's generators are his own."""


class FakeOptimizer(AdamW):
    """All gradients are finite."""

    def update(self, lr: float, norm: Tensor, scale: Tensor, finite: Tensor) -> None:
        super().update(lr, norm, scale, torch.ones_like(finite) if self.fused else torch.tensor(True))


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[World]:
    """This process as one rank of many."""
    if dist.is_available() and dist.is_initialized():
        raise ConfigError("this process is a rank of a run already", "allowed: simulate in a process of its own")
    if ranks > 1:
        init_fake_process_group(rank, ranks)
    try:
        yield World(rank, ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_second_step(
    config: RunConfig, layout: Layout, batch: Batch, world: World, size: StepSize
) -> tuple[StepTrace, InFlightTracker | None]:
    """The second step of a rank of this size, under the ledgers: by then everything has been made that is made once."""
    imagined = FakeTensors()
    clear_dtensor_cache()
    with warnings.catch_warnings(), patched_for_simulation():
        warnings.simplefilter("ignore")
        spread = parallelize_fake_model(config, layout, world, size, imagined)
        with imagined.active():
            return run(config, layout, replace(batch, accumulation=size.micros), world, spread)


def parallelize_fake_model(
    config: RunConfig, layout: Layout, world: World, size: StepSize, imagined: FakeTensors
) -> ParallelModel:
    """The real model and the real parallelism; torch cuts and shards imagined tensors from outside alone."""
    dtype = Precision(config.precision, world.device).weights
    model = build_on_meta(replace(config.model, layers=sum(size.blocks)), dtype)
    with imagined.active():
        Materializer(model, None, world.device).allocate(model)
    plan = small_plan(stage_plan(config, layout, world.rank), size) if layout.pipeline > 1 else None
    parts = decoder_parallel_spec(config.model)
    spread = parallelize(model, config, layout, world, parts, no_content, plan=plan, copies=FakeDDP)
    share_evenly(spread.module)
    return spread


def no_content(_block: LocalShard, _name: str) -> None:
    """What weights imagined parameters hold: none."""


def small_plan(plan: StagePlan, size: StepSize) -> StagePlan:
    """The same stages with fewer blocks each, numbered from 0."""
    ends = list(accumulate(size.blocks))
    stages = {
        stage: range(end - count, end)
        for stage, end, count in zip(plan.placement.stages, ends, size.blocks, strict=True)
    }  # fmt: skip
    return replace(plan, placement=PipelinePlacement(stages, plan.placement.stage_count), micro_batches=size.micros)


def run(
    config: RunConfig, layout: Layout, batch: Batch, world: World, spread: ParallelModel
) -> tuple[StepTrace, InFlightTracker | None]:
    optimizer = FakeOptimizer(spread.parameters(), config.optimizer, layout, world, config.optimizer.cpu_offload)
    precision = Precision(config.precision, world.device)
    step = FakeStep(StepContext.for_rank(config, layout, world, spread, optimizer, precision))
    batches = micro_batches(batch, config.data.sequence)
    step.run(0, LR, batches)
    with count_step(spread, optimizer, MemoryTimelineTracker) as counted:
        outcome = step.run(1, LR, batches, counted.enter)
    assert isinstance(counted.memory, MemoryTimelineTracker)
    sums = {(row.axis, row.collective, row.ranks): (row.calls, row.message_bytes) for row in counted.rows()}
    return StepTrace(sums, counted.memory.course), outcome.in_flight


def micro_batches(batch: Batch, sequence: int) -> Iterator[list[MicroBatch]]:
    """Tokens and labels of every micro-step, step after step."""

    def tokens() -> Tensor:
        return torch.zeros(batch.micro, sequence, dtype=torch.int64)

    while True:
        yield [MicroBatch((tokens(), tokens()), batch.micro * sequence) for _ in range(batch.accumulation)]
