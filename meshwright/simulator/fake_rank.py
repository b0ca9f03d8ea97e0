"""One rank of a fake process group: the real model, parallelism and training step on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config import Batch, RunConfig
from meshwright.data.loader import MicroBatch
from meshwright.errors import ConfigError
from meshwright.models.init import build_on_meta, set_trainable
from meshwright.models.registry import block_costs, run_spec
from meshwright.optim.build import build_optimizer
from meshwright.parallel.local_shard import LocalShard
from meshwright.parallel.materialize import Materializer
from meshwright.parallel.parallel_model import InFlightTracker, ParallelModel
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.tensor_parallel import family_parallel_spec
from meshwright.parallel.world import World
from meshwright.simulator.extrapolation import MemoryTimeline, SimulatedStep
from meshwright.simulator.fake_ddp import FakeDDP
from meshwright.simulator.uniform_routing import route_uniformly
from meshwright.telemetry.memory_classes import TENSOR_CLASSES
from meshwright.telemetry.memory_tracker import UNINITIALIZED, MemoryTracker
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import PipelinePlacement, pipeline_placement
from meshwright.torch_private import FakeTensors, clear_dtensor_cache, init_fake_process_group, patched_for_simulation
from meshwright.trainer.build import parallelize_objective
from meshwright.trainer.custom_model import CustomModel
from meshwright.trainer.precision import Precision
from meshwright.trainer.records.step_counters import count_step
from meshwright.trainer.records.trace_custom_model import build_objective_on_meta
from meshwright.trainer.step import Step, StepContext, StepControl

CLASSES = (*TENSOR_CLASSES, UNINITIALIZED)
LR = 1e-3


@dataclass(frozen=True)
class StepSize:
    """The part of a step that is simulated: the number of blocks of each of the rank's stages, and of micro-steps."""

    blocks: tuple[int, ...]
    micro_steps: int


@dataclass(frozen=True)
class CustomStep:
    """A user's model, and one micro-batch of its data, of which only shapes and dtypes are used."""

    custom: CustomModel
    micro_batch: MicroBatch


class MemoryTimelineTracker(MemoryTracker):
    """A memory tracker that records the memory in use after every change."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.timeline: MemoryTimeline = [("begin", [])]

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.timeline.append((phase, []))
        self._phase = phase
        self._classify()

    def _mark_peaks(self, kind: str, size: int) -> None:
        super()._mark_peaks(kind, size)
        self.timeline[-1][1].append(((kind, size), tuple(self._bytes[name] for name in CLASSES)))


class FakeStep(Step):
    """A step that does not read the step control vector, which fake tensors do not have."""

    def _read_control(self, step: int, batches: list[MicroBatch], sums: Tensor) -> StepControl:  # noqa: ARG002
        return StepControl(tokens=1, bad_samples=0)

    def _seed(self, step: int) -> None:
        """Leaves the caller's random generators untouched: fake tensors need no random numbers."""


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[World]:
    """Makes this process one rank of a fake process group."""
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "this process already belongs to a process group", "try to call simulate in a separate process"
        )
    if ranks > 1:
        init_fake_process_group(rank, ranks)
    try:
        yield World(rank, ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_second_step(
    config: RunConfig, layout: Layout, batch: Batch, world: World, size: StepSize, step: CustomStep | None = None
) -> tuple[SimulatedStep, InFlightTracker | None]:
    """Runs two steps and traces the second, because the first one allocates what is allocated once per run. `step` is
    that of a user's model; by default the model of the config runs on sequences of tokens.
    """
    fake_tensors = FakeTensors()
    clear_dtensor_cache()
    with warnings.catch_warnings(), patched_for_simulation():
        warnings.simplefilter("ignore")
        batch = replace(batch, accumulation=size.micro_steps)
        if step is None:
            model = parallelize_fake_model(config, layout, world, size, fake_tensors)
            batches = token_batches(batch, config.data.sequence)
        else:
            model = parallelize_custom_model(config, layout, world, step.custom, fake_tensors)
            batches = copies_of(step.micro_batch, batch.accumulation)
        with fake_tensors.active():
            return trace_second_step(config, layout, world, model, batches)


def parallelize_fake_model(
    config: RunConfig, layout: Layout, world: World, size: StepSize, fake_tensors: FakeTensors
) -> ParallelModel:
    """Builds and parallelizes the real model. torch shards fake parameters only outside the fake tensor mode."""
    precision = Precision(config.precision, world.device)
    placement = pipeline_placement(config, layout, world.rank, block_costs(config))
    blocks = sum(size.blocks)
    architecture = run_spec(config).architecture
    if layout.pipeline > 1 and architecture is not None and architecture.dense_layers:
        blocks = config.model.layers  # what a block has depends on its number
    elif layout.pipeline > 1:
        placement = shrink_stages(placement, size)
        blocks += len(size.blocks) + 1
    shrunk = replace(config, model=replace(config.model, layers=blocks))
    model = build_on_meta(shrunk.model, precision.parameters, config.lora, precision.residual)
    set_trainable(model, run_spec(shrunk))
    with fake_tensors.active():
        Materializer(model, None, world.device).allocate(model)
    spec = family_parallel_spec(run_spec(config))
    parallel_model = parallelize(model, config, layout, world, spec, skip_init, placement=placement, ddp=FakeDDP)
    route_uniformly(parallel_model.module)
    return parallel_model


def parallelize_custom_model(
    config: RunConfig, layout: Layout, world: World, custom: CustomModel, fake_tensors: FakeTensors
) -> ParallelModel:
    """Parallelizes a copy of a user's model and loss without their values."""
    dtype = Precision(config.precision, world.device).parameters
    objective = build_objective_on_meta(custom, dtype)
    with fake_tensors.active():
        Materializer(objective, None, world.device).allocate(objective)
    parallel_model = parallelize_objective(objective, custom, config, layout, world, ddp=FakeDDP)
    route_uniformly(parallel_model.module)
    return parallel_model


def skip_init(_shard: LocalShard, _name: str) -> None:
    """Initializes a fake parameter: there is nothing to write."""


def shrink_stages(placement: PipelinePlacement, size: StepSize) -> PipelinePlacement:
    """Returns the same stages with fewer blocks each. A block of another stage precedes and follows each of them, as in
    the full model.
    """
    starts = [1 + index + sum(size.blocks[:index]) for index in range(len(size.blocks))]
    spans = [range(start, start + count) for start, count in zip(starts, size.blocks, strict=True)]
    return PipelinePlacement(dict(zip(placement.stages, spans, strict=True)), placement.stage_count)


def trace_second_step(
    config: RunConfig, layout: Layout, world: World, model: ParallelModel, batches: Iterator[list[MicroBatch]]
) -> tuple[SimulatedStep, InFlightTracker | None]:
    optimizer = build_optimizer(
        model.parameters(),
        config.optimizer,
        layout,
        world,
        model.block_patterns,
        model.name_prefix,
        masters=model.masters,
    )
    for rule in optimizer.rules:
        rule.is_finite = lambda _finite: True
    precision = Precision(config.precision, world.device)
    step = FakeStep(StepContext.for_rank(config, layout, world, model, optimizer, precision))
    step.run(0, LR, batches)
    with count_step(model, optimizer, MemoryTimelineTracker) as counters:
        outcome = step.run(1, LR, batches, counters.enter)
    assert isinstance(counters.memory, MemoryTimelineTracker)
    collectives = {(row.axis, row.collective, row.ranks): (row.calls, row.message_bytes) for row in counters.rows()}
    return SimulatedStep(collectives, counters.memory.timeline), outcome.in_flight


def token_batches(batch: Batch, sequence: int) -> Iterator[list[MicroBatch]]:
    """Yields the micro-batches of one step after the other."""

    def tokens() -> Tensor:
        return torch.zeros(batch.micro, sequence, dtype=torch.int64)

    while True:
        yield [MicroBatch((tokens(), tokens()), batch.micro * sequence) for _ in range(batch.accumulation)]


def copies_of(micro_batch: MicroBatch, accumulation: int) -> Iterator[list[MicroBatch]]:
    """Yields the micro-batches of one step after the other, each with the shapes and dtypes of this one."""
    while True:
        yield [
            replace(micro_batch, tensors=tuple(torch.zeros(t.shape, dtype=t.dtype) for t in micro_batch.tensors))
            for _ in range(accumulation)
        ]
