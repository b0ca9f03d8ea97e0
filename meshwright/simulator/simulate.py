"""Chosen ranks of a layout, one after the other in this process: a few blocks of each, and what follows for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from meshwright.config import Batch, RunConfig
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.parallel.parallel_model import InFlightTracker
from meshwright.planner.exact.activation_messages import data_dependent_axes
from meshwright.simulator.extrapolation import ClassBytes, Extrapolation, StepTrace, extrapolate, peaks
from meshwright.simulator.fake_rank import CLASSES, StepSize, fake_world, run_second_step
from meshwright.simulator.result import RankResult, Simulation
from meshwright.telemetry.comm_counter import CollectiveTotal
from meshwright.telemetry.memory_tracker import KINDS, UNINITIALIZED
from meshwright.topology import schedules
from meshwright.topology.collectives import wire_bytes
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.parameter_shapes import decoder_parameter_shapes
from meshwright.topology.parameter_shards import pipeline_placement, uses_ddp
from meshwright.topology.schedule_timeline import peak_in_flight
from meshwright.topology.unsupported import validate

LEAST_BLOCKS = 3
"""The first, the last and one of those between."""
LEAST_MICROS = 3
"""The same."""
FULL_PIPELINE = 3
"""From so many micro-batches a rank on, more of them are more of the same."""

MOST_RANKS = 1 << 17


def simulate(config: RunConfig, ranks: Sequence[int] | None = None) -> Simulation:
    """A step of these ranks (default: the first, and of a pipeline the last)."""
    start = time.monotonic()
    config = replace(config, compile=replace(config.compile, enabled=False))
    layout, batch = validate(config)
    chosen = checked_ranks(ranks, layout)
    found = [simulate_rank(config, layout, batch, rank) for rank in chosen]
    orders = pipeline_orders(config, layout, batch)
    return Simulation(
        str(layout),
        layout.ranks,
        str(batch),
        sum(shape.local_numel() for shape in decoder_parameter_shapes(config.model)),
        config.pipeline.schedule if layout.pipeline > 1 else "",
        [peak_in_flight(order) for order in orders],
        found,
        notes_of(config, layout),
        round(time.monotonic() - start, 3),
    )


def checked_ranks(ranks: Sequence[int] | None, layout: Layout) -> list[int]:
    if layout.ranks > MOST_RANKS:
        raise ConfigError(f"{layout.ranks:,} ranks are too many to imagine", f"allowed: up to {MOST_RANKS:,}")
    if not ranks:
        return [0] if layout.pipeline == 1 else [0, layout.ranks - layout.stride("pipeline")]
    for rank in ranks:
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"rank {rank} is none of the layout {layout}", f"allowed: from 0 to {layout.ranks - 1}")
    return sorted(set(ranks))


def simulate_rank(config: RunConfig, layout: Layout, batch: Batch, rank: int) -> RankResult:
    start = time.monotonic()
    stages = {stage: len(blocks) for stage, blocks in pipeline_placement(config, layout, rank).stages.items()}
    blocks, micros = block_line(config, layout, list(stages.values())), micro_line(config, layout, batch)
    seen, pace = whole_step(config, layout, batch, rank, list(stages.values()), blocks, micros)
    alone, together = peaks(seen.course)
    place = layout.coordinates(rank)
    return RankResult(
        rank,
        {axis: place[axis] for axis in layout.active_axes},
        stages,
        rows_of(seen),
        by_kind(alone, fresh=False),
        by_kind(together),
        dict(pace.peak) if pace else {},
        pace.peak_total if pace else 0,
        multiplied(blocks, micros),
        round(time.monotonic() - start, 3),
    )


def whole_step(
    config: RunConfig,
    layout: Layout,
    batch: Batch,
    rank: int,
    each: list[int],
    blocks: Extrapolation,
    micros: Extrapolation,
) -> tuple[StepTrace, InFlightTracker | None]:
    """The step as it is, or carried on from small ones. Blocks of all stages grow together."""
    by_micros, pace = [], None
    with fake_world(rank, layout.ranks) as world:
        for micro in micros.points:
            by_blocks = []
            for count in blocks.points:
                size = StepSize(tuple(own - (blocks.whole - count) for own in each), micro)
                try:
                    seen, pace = run_second_step(config, layout, batch, world, size)
                except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # how torch refuses
                    raise refused(layout, rank, error) from error
                by_blocks.append(seen)
            by_micros.append(extrapolate(by_blocks, blocks.times))
    return extrapolate(by_micros, micros.times), pace


def refused(layout: Layout, rank: int, error: Exception) -> MeshwrightError:
    """torch's own words, in one line."""
    if isinstance(error, MeshwrightError):
        return error
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError(f"layout {layout}, rank {rank}: torch does not build it: {said}", "allowed: another layout")


def block_line(config: RunConfig, layout: Layout, each: list[int]) -> Extrapolation:
    """Of the stage with the fewest blocks; the others have as many more in every step. Segments stay whole. DDP's
    buckets do not end where blocks do.
    """
    if uses_ddp(layout):
        return Extrapolation(min(each))
    together = config.activation_checkpoint.segment if config.activation_checkpoint.mode == "full" else 1
    return Extrapolation.to(min(each), LEAST_BLOCKS * together, together)


def micro_line(config: RunConfig, layout: Layout, batch: Batch) -> Extrapolation:
    """A pipeline grows by rounds once it is full; by gpipe it never is."""
    whole, ranks = batch.accumulation, layout.pipeline
    if ranks == 1:
        return Extrapolation.to(whole, LEAST_MICROS)
    if config.pipeline.schedule == "gpipe" or whole % ranks:
        return Extrapolation(whole)
    return Extrapolation.to(whole, FULL_PIPELINE * ranks, ranks)


def multiplied(blocks: Extrapolation, micros: Extrapolation) -> list[str]:
    said = []
    for line, name in ((blocks, "blocks a stage"), (micros, "micro-steps")):
        if len(line.points) > 1:
            few, more = line.points
            said.append(f"{few} and {more} {name} gone through, for {line.whole}")
    return said


def rows_of(seen: StepTrace) -> list[CollectiveTotal]:
    """As the traffic ledger gives them."""
    rows = [
        CollectiveTotal(axis, collective, calls, message, wire_bytes(collective, message, ranks), ranks)
        for (axis, collective, ranks), (calls, message) in seen.sums.items()
    ]
    return sorted(rows)


def by_kind(moment: ClassBytes, fresh: bool = True) -> dict[str, int]:
    """A buffer that nobody has written yet is temporary; by itself the class is without them."""
    held = dict(zip(CLASSES, moment, strict=True))
    return {kind: held[kind] + (held[UNINITIALIZED] if fresh and kind == "temporary" else 0) for kind in KINDS}


def pipeline_orders(config: RunConfig, layout: Layout, batch: Batch) -> list[schedules.ActionOrder]:
    if layout.pipeline == 1:
        return []
    return schedules.action_orders(
        config.pipeline.schedule, layout.pipeline, batch.accumulation, stages_per_rank(config)
    )


def notes_of(config: RunConfig, layout: Layout) -> list[str]:
    """What was taken for granted."""
    said = ["memory as on CPU: on a device FSDP2 gathers fsdp.prefetch units ahead, and kernels keep other things"]
    if uses_ddp(layout):
        said.append("DDP does not work without memory: its buckets are filled and summed here by its rule")
    if config.model.experts:
        said.append("every expert gets an even share of the tokens")
    said += [f"{axis}: {why}" for axis, why in data_dependent_axes(config, layout).items()]
    return said
