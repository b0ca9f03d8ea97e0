"""Simulation of one training step on selected ranks of a layout, one rank after the other, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from meshwright.base.config import Batch, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.models.registry import block_costs, run_spec, validate_family
from meshwright.base.records.memory_classes import TENSOR_CLASSES
from meshwright.base.topology import schedule_orders
from meshwright.base.topology.collectives import wire_bytes
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.parameter_shards import pipeline_placement, uses_ddp
from meshwright.base.topology.schedule_timeline import peak_in_flight
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.base.topology.unsupported import validate
from meshwright.base.topology.unused_settings import unused_settings
from meshwright.core.data.source import Source
from meshwright.core.launch.user_code.update import require_built_in_update
from meshwright.core.parallel.parallel_model import InFlightTracker
from meshwright.core.parallel.parallel_spec import find_blocks
from meshwright.core.parallel.world import World, device_type
from meshwright.core.telemetry.comm_counter import CollectiveTotal
from meshwright.core.telemetry.memory_tracker import UNINITIALIZED
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.records.trace_custom_model import first_micro_batch
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.planner.cost.trace.activation_messages import data_dependent_axes
from meshwright.prover.simulator.extrapolation import (
    ClassBytes,
    Extrapolation,
    ExtrapolationError,
    SimulatedStep,
    extrapolate,
    peaks,
)
from meshwright.prover.simulator.fake_rank import CLASSES, CustomStep, fake_world, trace_steps
from meshwright.prover.simulator.result import RankResult, Simulation

MIN_BLOCKS = 4
"""The first two blocks and the last two. With only one block between the first and the last, it may not be possible to
tell where it begins, and it would be matched from one end only (see `match_entries`)."""
MIN_MICRO_STEPS = 4
"""The first micro-step, the second (the first to accumulate into gradients), the last, and one that stands for those
between them."""
MIN_PIPELINE_ROUNDS = 3
"""From this many rounds of micro-batches on, the pipeline is full and further rounds repeat."""
MAX_RANKS = 1 << 17
MAX_BLOCK_PASSES = 1 << 13
"""Limit of blocks times micro-steps of one simulated step: each pass takes some ten milliseconds."""


def simulate(
    config: RunConfig,
    ranks: Sequence[int] | None = None,
    custom: CustomModel | None = None,
    sources: Sequence[Source] = (),
) -> Simulation:
    """Simulates a step on these ranks. The default is rank 0 and, with a pipeline, the first rank of the last stage.
    `custom` replaces the model of the config; the shapes of its micro-batches are those of the first one of `sources`.
    """
    start = time.monotonic()
    config = with_device_defaults(config, device_type(config.launch), custom is not None)
    config = replace(config, compile=replace(config.compile, enabled=False))
    layout, batch = validate(config, own_model=custom is not None)
    require_built_in_update(config, "simulate")
    if custom is None:
        validate_family(config)
        require_equal_blocks(config)
    selected = select_ranks(ranks, layout)
    step = CustomStep(custom, first_micro_batch(config, batch, sources, custom)) if custom is not None else None
    results = [simulate_rank(config, layout, batch, rank, step) for rank in selected]
    orders = pipeline_orders(config, layout, batch)
    return Simulation(
        str(layout),
        layout.ranks,
        str(batch),
        count_parameters(config, custom),
        config.pipeline.schedule if layout.pipeline > 1 else "",
        [peak_in_flight(order) for order in orders],
        results,
        [*assumptions(config, layout, custom is not None), *unused_settings(config)],
        round(time.monotonic() - start, 3),
    )


def count_parameters(config: RunConfig, custom: CustomModel | None) -> int:
    """The number of parameters of the full model; tied weights count once."""
    if custom is None:
        return run_spec(config).parameter_count
    return sum(parameter.numel() for module in custom.modules() for parameter in module.parameters())


def select_ranks(ranks: Sequence[int] | None, layout: Layout) -> list[int]:
    if layout.ranks > MAX_RANKS:
        raise ConfigError(f"{layout.ranks:,} ranks are too many to simulate", f"expected up to {MAX_RANKS:,}")
    if not ranks:
        return [0] if layout.pipeline == 1 else [0, layout.ranks - layout.stride("pipeline")]
    for rank in ranks:
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"rank {rank} does not exist in layout {layout}", f"expected 0 to {layout.ranks - 1}")
    return sorted(set(ranks))


def simulate_rank(
    config: RunConfig, layout: Layout, batch: Batch, rank: int, step: CustomStep | None = None
) -> RankResult:
    start = time.monotonic()
    costs = block_costs(config) if step is None else (1.0,) * count_blocks(step.custom)
    placement = pipeline_placement(config, layout, rank, costs)
    stages = {stage: len(blocks) for stage, blocks in placement.stages.items()}
    blocks = plan_blocks(config, layout, list(stages.values()))
    if step is not None:  # its blocks may differ, so all of them run
        blocks = Extrapolation(min(stages.values()))
    micro_steps = plan_micro_steps(config, layout, batch, rank)
    with fake_world(rank, layout.ranks) as world:
        simulated = StepSimulator(config, layout, batch, world, list(stages.values()), step)
        try:
            require_few_passes(max(blocks.simulated_counts), max(micro_steps.simulated_counts), config)
            trace, extrapolated = simulated.extrapolate(blocks, micro_steps), describe(blocks, micro_steps)
        except ExtrapolationError:  # the exact answer takes longer
            require_few_passes(blocks.target, micro_steps.target, config)
            (trace,), extrapolated = simulated.run(blocks.target, [micro_steps.target], blocks.target), []
    by_class, at_peak = peaks(trace.timeline)
    coordinates, in_flight = layout.coordinates(rank), simulated.in_flight
    return RankResult(
        rank,
        {axis: coordinates[axis] for axis in layout.active_axes},
        stages,
        collective_totals(trace),
        name_classes(by_class, with_uninitialized=False),
        name_classes(at_peak),
        dict(in_flight.peak) if in_flight else {},
        in_flight.peak_total if in_flight else 0,
        extrapolated,
        round(time.monotonic() - start, 3),
    )


def count_blocks(custom: CustomModel) -> int:
    """The number of blocks of a user's model; a model without repeated blocks counts as one block."""
    return len(find_blocks(custom.module, custom.spec)) if any(custom.spec.block_patterns) else 1


def require_few_passes(blocks: int, micro_steps: int, config: RunConfig) -> None:
    """Raises ConfigError if a step takes too long to simulate. Steps of a layout that shards are extrapolated from a
    few blocks and micro-steps; those of DDP and of GPipe are not.
    """
    if blocks * micro_steps > MAX_BLOCK_PASSES:
        raise ConfigError(
            f"a step of {blocks:,} blocks and {micro_steps:,} micro-steps is too large to simulate "
            f"(model.layers = {config.model.layers}, layout.shard = {config.layout.shard})",
            f"expected at most {MAX_BLOCK_PASSES:,} blocks x micro-steps, or try layout.shard = parameters",
        )


class StepSimulator:
    """Runs steps of one rank with fewer blocks and micro-steps, and extrapolates from them."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        batch: Batch,
        world: World,
        blocks: list[int],
        step: CustomStep | None = None,
    ) -> None:
        self.config, self.layout, self.batch, self.world, self.blocks = config, layout, batch, world, blocks
        self.step = step
        self.in_flight: InFlightTracker | None = None

    def extrapolate(self, blocks: Extrapolation, micro_steps: Extrapolation) -> SimulatedStep:
        """Extrapolates over blocks first, then over micro-steps. All stages grow by the same number of blocks."""
        counts = micro_steps.simulated_counts
        by_blocks = [self.run(count, counts, blocks.target) for count in blocks.simulated_counts]
        by_micro_steps = [extrapolate(traces, blocks.strides) for traces in zip(*by_blocks, strict=True)]
        return extrapolate(by_micro_steps, micro_steps.strides)

    def run(self, blocks: int, micro_steps: Sequence[int], target_blocks: int) -> list[SimulatedStep]:
        """One step per number of micro-steps; the stage with the fewest blocks has `blocks` instead of the target."""
        stage_blocks = tuple(count - (target_blocks - blocks) for count in self.blocks)
        try:
            traced = trace_steps(
                self.config, self.layout, self.batch, self.world, stage_blocks, micro_steps, self.step
            )  # fmt: skip
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # what torch raises for a bad layout
            raise as_config_error(self.layout, self.world.rank, error) from error
        self.in_flight = traced[-1].in_flight
        return [step.trace for step in traced]


def as_config_error(layout: Layout, rank: int, error: Exception) -> MeshwrightError:
    """Wraps an error of torch in one line."""
    if isinstance(error, MeshwrightError):
        return error
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError(f"layout {layout}, rank {rank}: torch cannot build this layout: {message}", "try another layout")


def plan_blocks(config: RunConfig, layout: Layout, blocks: list[int]) -> Extrapolation:
    """Extrapolates the stage with the fewest blocks; the other stages keep their difference to it. The blocks of an
    activation-checkpointing segment stay together. DDP is not extrapolated, because its buckets span blocks, nor is a
    pipeline whose first blocks differ from the others.
    """
    architecture = run_spec(config).architecture
    dense = architecture.dense_layers if architecture is not None else 0
    if uses_ddp(layout) or (dense and layout.pipeline > 1):
        return Extrapolation(min(blocks))
    segment = config.activation_checkpoint.segment if config.activation_checkpoint.mode == "full" else 1
    return Extrapolation.plan(min(blocks), dense + MIN_BLOCKS * segment, segment)


def plan_micro_steps(config: RunConfig, layout: Layout, batch: Batch, rank: int) -> Extrapolation:
    """With one stage per rank, a full pipeline grows by one micro-batch; with several, by rounds of one micro-batch per
    rank. GPipe keeps all micro-batches in flight and is never full.
    """
    accumulation, ranks, schedule = batch.accumulation, layout.pipeline, SCHEDULES[config.pipeline.schedule]
    if ranks == 1:
        return Extrapolation.plan(accumulation, MIN_MICRO_STEPS)
    if schedule.single_stage and not schedule.all_forward_first:
        warmup = ranks - 1 - layout.coordinates(rank)["pipeline"]
        # torch keeps the last output that a rank sends before its first backward pass, until the end of the step; it is
        # an addition to the memory in use after as many backward passes
        fewest = max(schedule.min_micro_batches(ranks), warmup + MIN_MICRO_STEPS, 2 * warmup + 2)
        return Extrapolation.plan(accumulation, fewest)
    if schedule.all_forward_first or accumulation % ranks:
        return Extrapolation(accumulation)
    return Extrapolation.plan(accumulation, MIN_PIPELINE_ROUNDS * ranks, ranks)


def describe(blocks: Extrapolation, micro_steps: Extrapolation) -> list[str]:
    lines = []
    for plan, name in ((blocks, "blocks per stage"), (micro_steps, "micro-steps")):
        if len(plan.simulated_counts) > 1:
            small, large = plan.simulated_counts
            lines.append(f"extrapolated from {small} and {large} to {plan.target} {name}")
    return lines


def collective_totals(trace: SimulatedStep) -> list[CollectiveTotal]:
    """The rows that a `CommCounter` would report."""
    rows = [
        CollectiveTotal(axis, collective, calls, message_bytes, wire_bytes(collective, message_bytes, ranks), ranks)
        for (axis, collective, ranks), (calls, message_bytes) in trace.collectives.items()
    ]
    return sorted(rows)


def name_classes(counts: ClassBytes, with_uninitialized: bool = True) -> dict[str, int]:
    """Bytes by class. Buffers that have not been written yet count as temporary, except in the peak of that class."""
    named = dict(zip(CLASSES, counts, strict=True))
    if with_uninitialized:
        named["temporary"] += named[UNINITIALIZED]
    return {kind: named[kind] for kind in TENSOR_CLASSES}


def pipeline_orders(config: RunConfig, layout: Layout, batch: Batch) -> list[schedule_orders.ActionOrder]:
    if layout.pipeline == 1:
        return []
    return schedule_orders.action_orders(
        config.pipeline.schedule, layout.pipeline, batch.accumulation, stages_per_rank(config)
    )


def assumptions(config: RunConfig, layout: Layout, custom: bool = False) -> list[str]:
    """What the simulation assumes about this config, one line each."""
    lines = ["memory is that of CPU kernels; on a GPU, FSDP2 prefetches fsdp.prefetch more units and kernels differ"]
    if uses_ddp(layout):
        lines.append("DDP needs real memory, so its buckets are filled and all-reduced by a reimplementation")
    if custom:
        return [*lines, "all micro-batches have the shapes of the first one"]
    if config.model.experts:
        lines.append("tokens are routed uniformly over experts")
    lines += [f"{axis}: {reason}" for axis, reason in data_dependent_axes(config, layout).items()]
    return lines


def require_equal_blocks(config: RunConfig) -> None:
    """Raises a ConfigError if some blocks have frozen parameters that others train: a few blocks are simulated, and
    stand for all.
    """
    frozen: dict[str, set[str]] = {}
    for parameter in run_spec(config).parameters:
        if not parameter.trainable:
            frozen.setdefault(parameter.unit, set()).add(parameter.name.removeprefix(parameter.unit))
    blocks = run_spec(config).block_names
    if len({frozenset(frozen.get(block, ())) for block in blocks}) > 1:
        raise ConfigError(
            "optimizer.groups freezes parameters of some blocks and not of others, which simulate does not support",
            "try patterns that match the parameters of all blocks, or meshwright plan",
        )
