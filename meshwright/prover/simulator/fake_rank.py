"""One rank of a fake process group: the real model, parallelism and training step on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import Batch, RunConfig
from meshwright.base.models.registry import block_costs, run_spec
from meshwright.base.records.memory_classes import TENSOR_CLASSES
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import PipelinePlacement, pipeline_placement
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.core.data.loader import MicroBatch
from meshwright.core.fake_operators import RunOperator, run_fake_operator
from meshwright.core.models.init import build_on_meta, set_trainable
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.materialize import Materializer
from meshwright.core.parallel.parallel_model import InFlightTracker, ParallelModel
from meshwright.core.parallel.parallelize import parallelize
from meshwright.core.parallel.tensor_parallel import family_parallel_spec
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.memory_tracker import UNINITIALIZED, MemoryTracker
from meshwright.core.torch_private import (
    FakeOperatorMode,
    FakeTensors,
    clear_dtensor_cache,
    init_fake_process_group,
    patched_for_simulation,
)
from meshwright.core.trainer.build import parallelize_objective
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.step_counters import CountedOperators, count_step
from meshwright.core.trainer.records.trace_custom_model import build_objective_on_meta
from meshwright.core.trainer.step import Step, StepContext, StepControl
from meshwright.errors import ConfigError
from meshwright.prover.simulator.extrapolation import MemoryTimeline, SimulatedStep
from meshwright.prover.simulator.fake_ddp import FakeDDP
from meshwright.prover.simulator.operator_cache import OperatorCache
from meshwright.prover.simulator.uniform_routing import route_uniformly

CLASSES = (*TENSOR_CLASSES, UNINITIALIZED)
LR = 1e-3


@dataclass(frozen=True)
class CustomStep:
    """A user's model, and one micro-batch of its data, of which only shapes and dtypes are used."""

    custom: CustomModel
    micro_batch: MicroBatch


class TracedStep(NamedTuple):
    """A simulated step, and the micro-batches that the rank kept during a pipeline schedule."""

    trace: SimulatedStep
    in_flight: InFlightTracker | None


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
        self.timeline[-1][1].append(((kind, size), tuple(self._bytes.values())))  # in the order of CLASSES


class FakeStep(Step):
    """A step on fake tensors. It does not read the step control vector, which has no value."""

    def __init__(self, context: StepContext, fake: FakeTensors, run: RunOperator) -> None:
        super().__init__(context)
        self.fake, self.run_operator = fake, run

    def _read_control(self, step: int, batches: list[MicroBatch], sums: Tensor) -> StepControl:  # noqa: ARG002
        return StepControl(tokens=1, bad_samples=0)

    def _seed(self, step: int) -> None:
        """Leaves the caller's random generators untouched: fake tensors need no random numbers."""

    def trace(self, micro_batch: MicroBatch, count: int) -> TracedStep:
        """Runs and traces a step of equal micro-batches that is not the first one. Fetching them is part of it."""
        with self.fake.active(self.run_operator):
            inputs = [self.parallel_model.shard_inputs(batch.tensors) for batch in copies_of(micro_batch, count)]
            self.parallel_model.prepare_schedule(inputs, self.precision.autocast)
            del inputs
        with (
            self.fake.mode,
            count_step(self.parallel_model, self.optimizer, MemoryTimelineTracker, mode=self.counting_mode) as counters,
        ):
            outcome = self.run(1, LR, (copies_of(micro_batch, count) for _ in range(1)), counters.enter)
        assert isinstance(counters.memory, MemoryTimelineTracker)
        collectives = {(row.axis, row.collective, row.ranks): (row.calls, row.message_bytes) for row in counters.rows()}
        return TracedStep(SimulatedStep(collectives, counters.memory.timeline), outcome.in_flight)

    def counting_mode(self, counted: CountedOperators) -> FakeOperatorMode:
        """One dispatch mode that counts operators and runs them."""
        return FakeOperatorMode(partial(counted.observe, run=partial(run_fake_operator, self.run_operator)))


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


def trace_steps(
    config: RunConfig,
    layout: Layout,
    batch: Batch,
    world: World,
    blocks: tuple[int, ...],
    micro_steps: Sequence[int],
    step: CustomStep | None = None,
) -> list[TracedStep]:
    """Runs one step per number of micro-steps, and traces it, with this number of blocks in each of the rank's stages.
    A first step that is not traced allocates what is allocated once per run. `step` is that of a user's model; by
    default the model of the config runs on sequences of tokens.
    """
    fake_tensors = FakeTensors()
    clear_dtensor_cache()
    with warnings.catch_warnings(), patched_for_simulation():
        warnings.simplefilter("ignore")
        if step is None:
            model = parallelize_fake_model(config, layout, world, blocks, fake_tensors)
        else:
            model = parallelize_custom_model(config, layout, world, step.custom, fake_tensors)
        run = OperatorCache(fake_tensors)
        with fake_tensors.active(run):
            micro_batch = token_batch(batch, config.data.sequence) if step is None else step.micro_batch
            fake_step = FakeStep(step_context(config, layout, world, model), fake_tensors, run)
            fake_step.run(0, LR, iter([copies_of(micro_batch, first_micro_steps(config, layout, micro_steps))]))
        return [fake_step.trace(micro_batch, count) for count in micro_steps]


def first_micro_steps(config: RunConfig, layout: Layout, traced: Sequence[int]) -> int:
    """The micro-steps of the first step: as few as allocate the same as those that are traced. With two, gradients
    accumulate; a schedule needs as many as fill its stages.
    """
    fewest = SCHEDULES[config.pipeline.schedule].min_micro_batches(layout.pipeline) if layout.pipeline > 1 else 1
    return min(max(2, fewest), *traced)


def parallelize_fake_model(
    config: RunConfig, layout: Layout, world: World, blocks: tuple[int, ...], fake_tensors: FakeTensors
) -> ParallelModel:
    """Builds and parallelizes the real model. torch shards fake parameters only outside the fake tensor mode."""
    precision = Precision(config.precision, world.device)
    placement = pipeline_placement(config, layout, world.rank, block_costs(config))
    layers = sum(blocks)
    architecture = run_spec(config).architecture
    if layout.pipeline > 1 and architecture is not None and architecture.dense_layers:
        layers = config.model.layers  # what a block has depends on its number
    elif layout.pipeline > 1:
        placement = shrink_stages(placement, blocks)
        layers += len(blocks) + 1
    shrunk = replace(config, model=replace(config.model, layers=layers))
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


def shrink_stages(placement: PipelinePlacement, blocks: tuple[int, ...]) -> PipelinePlacement:
    """Returns the same stages with fewer blocks each. A block of another stage precedes and follows each of them, as in
    the full model.
    """
    starts = [1 + index + sum(blocks[:index]) for index in range(len(blocks))]
    spans = [range(start, start + count) for start, count in zip(starts, blocks, strict=True)]
    return PipelinePlacement(dict(zip(placement.stages, spans, strict=True)), placement.stage_count)


def step_context(config: RunConfig, layout: Layout, world: World, model: ParallelModel) -> StepContext:
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
    return StepContext.for_rank(config, layout, world, model, optimizer, precision)


def token_batch(batch: Batch, sequence: int) -> MicroBatch:
    """A micro-batch of tokens."""

    def tokens() -> Tensor:
        return torch.zeros(batch.micro, sequence, dtype=torch.int64)

    return MicroBatch((tokens(), tokens()), batch.micro * sequence)


def copies_of(micro_batch: MicroBatch, count: int) -> list[MicroBatch]:
    """Micro-batches with the shapes and dtypes of this one."""
    return [
        replace(micro_batch, tensors=tuple(torch.zeros(t.shape, dtype=t.dtype) for t in micro_batch.tensors))
        for _ in range(count)
    ]
