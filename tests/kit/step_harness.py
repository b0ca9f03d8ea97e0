"""A training step inside a rank, without the loop around it: tests build it, run it and count its bytes."""

from __future__ import annotations

from dataclasses import replace

from meshwright.base.config import BatchConfig, DataConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.loader import Loader
from meshwright.core.data.source import ConcatenatedSource, SyntheticSource
from meshwright.core.data.stream import Stream
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.world import World
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.step_counters import StepCounters, count_step
from meshwright.core.trainer.step import Step, StepContext
from meshwright.planner.cost.comm_volume import CollectiveVolume
from meshwright.planner.cost.peak_memory import StateMemory
from meshwright.prover.shrink.sizes import fit_accumulation, shrink
from meshwright.prover.shrink.source import MaskedSource

LR = 0.01
SAMPLES = 1000
ACCUMULATION = 3
MICRO = 2


def accumulating_config(config: RunConfig) -> RunConfig:
    """The config with small sizes and several micro-batches per step, without a capacity of experts."""
    layout = Layout.from_config(config.layout)
    small = shrink(config, config.layout)
    micro_batches = fit_accumulation(config, layout, ACCUMULATION)
    return replace(
        small,
        model=replace(small.model, capacity_factor=0.0),
        batch=BatchConfig(layout.data_degree * micro_batches * MICRO, MICRO),
        ddp=config.ddp,
    )


def masked_source(sequence: int, vocab: int, separator: int | None = None) -> MaskedSource:
    """Synthetic samples with different numbers of valid tokens."""
    return MaskedSource(SyntheticSource(SAMPLES, sequence, vocab), vocab, separator)


def build_step(world: World, config: RunConfig, layout: Layout) -> Step:
    """The step of this rank, as the training loop builds it."""
    config = with_device_defaults(config, world.device.type)
    precision = Precision(config.precision, world.device)
    parallel_model = build_parallel_decoder(config, layout, precision, world)
    optimizer = build_optimizer(
        parallel_model.parameters(),
        config.optimizer,
        layout,
        world,
        parallel_model.block_patterns,
        masters=parallel_model.masters,
    )
    return Step(StepContext.for_rank(config, layout, world, parallel_model, optimizer, precision))


def build_loader(world: World, config: RunConfig) -> Loader:
    """A loader of masked samples for this rank."""
    layout, batch = validate(config)
    source = masked_source(config.data.sequence, config.model.vocab, config.model.separator)
    stream = Stream.from_lengths(config.seed, batch.global_, [SAMPLES], [1.0], 0.0)
    coordinate = layout.data_coordinate(world.rank)
    return Loader(ConcatenatedSource([source]), stream, batch, coordinate, DataConfig(workers=0))


def count_third_step(world: World, config: RunConfig) -> StepCounters:
    """Counts the third step of a run: everything that is allocated once exists by then."""
    layout, _ = validate(config)
    step, loader = build_step(world, config, layout), build_loader(world, config)
    step.warmup_backward(loader.first)
    batches = loader.steps(0, 3)
    for number in range(2):
        step.run(number, LR, batches)
    with count_step(step.parallel_model, step.optimizer) as counters:
        step.run(2, LR, batches, counters.enter)
    return counters


def count_step_bytes(world: World, config: RunConfig) -> tuple[list[CollectiveVolume], StateMemory]:
    """What this rank communicates in a step, and the peak memory of its model state."""
    counters = count_third_step(world, config)
    volumes = [CollectiveVolume(row.axis, row.collective, row.message_bytes, row.wire_bytes) for row in counters.rows()]
    peak = counters.memory.peak
    return volumes, StateMemory(peak["parameter"], peak["gradient"], peak["optimizer"])
