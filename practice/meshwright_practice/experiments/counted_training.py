"""Runs the trainer's own steps on forked ranks of this machine and counts one of them, for experiments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwright.base.config import DataConfig, RunConfig, load_config
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.loader import Loader, MicroBatch
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.comm_counter import CONTROL, CollectiveTotal
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.step_counters import StepCounters, count_step
from meshwright.core.trainer.step import Step, StepContext, StepOutcome
from meshwright.testing import run_ranks

T = TypeVar("T")

ELEMENT_BYTES = 8
"""Experiments train in float64, in which layouts are equal to rounding errors of 1e-10 and less."""
SMALL_RUN = (
    "--model.vocab=64",
    "--model.width=32",
    "--model.layers=4",
    "--model.heads=4",
    "--model.kv_heads=4",
    "--model.ffn=48",
    "--data.kind=synthetic",
    "--data.samples=512",
    "--data.sequence=16",
    "--data.workers=0",
    "--precision.compute=fp64",
    "--optimizer.lr=0.01",
    "--schedule.kind=constant",
    "--schedule.warmup=0",
    "--eval.every=0",
    "--launch.device=cpu",
)
"""A decoder whose step takes milliseconds. Options that follow replace these."""
COUNTED_STEP = 1
"""The second step is counted: what is allocated once per run exists by then."""


@dataclass(frozen=True)
class CountedStep:
    """What one rank counted in one step."""

    collectives: tuple[CollectiveTotal, ...]
    """without the small control messages of a step"""
    peak: Mapping[str, int]
    """peak bytes by memory class"""
    resident: Mapping[str, int]
    """bytes by memory class after the step"""
    model_bytes: int
    """bytes of the parameters of the full model"""
    loss: float
    calls_by_phase: Mapping[str, int]
    """collectives that began in each phase of the step"""

    def wire(self, collective: str = "", axis: str = "") -> int:
        """The bytes that this rank sends by the ring algorithm, of one collective or axis or of all."""
        return sum(row.wire_bytes for row in self._select(collective, axis))

    def message(self, collective: str = "", axis: str = "") -> int:
        """The bytes of the full tensors."""
        return sum(row.message_bytes for row in self._select(collective, axis))

    def calls(self, collective: str = "", axis: str = "") -> int:
        return sum(row.calls for row in self._select(collective, axis))

    def _select(self, collective: str, axis: str) -> Iterator[CollectiveTotal]:
        return (r for r in self.collectives if collective in ("", r.collective) and axis in ("", r.axis))


class RankTraining:
    """The trainer of one rank without a run folder: the step, and the batches that it reads."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.config = world, config
        self.layout, self.batch = validate(config)
        self.precision = Precision(config.precision, world.device)
        self.model = self.build_model()
        self.optimizer = build_optimizer(
            self.model.parameters(), config.optimizer, self.layout, world, self.model.block_patterns
        )
        self.step = Step(StepContext.for_rank(config, self.layout, world, self.model, self.optimizer, self.precision))
        self.loader = self.open_loader(self.layout.data_coordinate(world.rank))
        self.step.warmup_backward(self.loader.first)
        self.batches: Iterator[list[MicroBatch]] = self.loader.steps(0, config.steps)
        self.done = 0

    def build_model(self) -> ParallelModel:
        return build_parallel_decoder(self.config, self.layout, self.precision, self.world)

    def open_loader(self, data_coordinate: int) -> Loader:
        sources = open_sources(self.config.data, self.config.model.vocab, None)
        stream = build_stream(self.config, sources)
        return Loader(ConcatenatedSource(sources), stream, self.batch, data_coordinate, DataConfig(workers=0))

    def run(self, on_phase: Callable[[str], None] = lambda _phase: None) -> StepOutcome:
        """Runs the next step."""
        outcome = self.step.run(self.done, self.config.optimizer.lr, self.batches, on_phase)
        self.done += 1
        return outcome

    def count(self) -> CountedStep:
        """Counts the second step."""
        while self.done < COUNTED_STEP:
            self.run()
        calls: Counter[str] = Counter()
        phase, before = "fetch", 0
        with count_step(self.model, self.optimizer) as counters:

            def enter(next_phase: str) -> None:
                nonlocal phase, before
                counters.enter(next_phase)
                now = sum(row.calls for row in without_control(counters))
                calls[phase] += now - before
                phase, before = next_phase, now

            outcome = self.run(enter)
        rows = without_control(counters)
        calls[phase] += sum(row.calls for row in rows) - before
        model_bytes = run_spec(self.config).parameter_count * ELEMENT_BYTES
        loss = float(outcome.numbers[0])
        return CountedStep(rows, counters.memory.peak, counters.memory.current_bytes, model_bytes, loss, calls)


def without_control(counters: StepCounters) -> tuple[CollectiveTotal, ...]:
    return tuple(row for row in counters.rows() if row.axis != CONTROL)


def small_config(ranks: int, *options: str) -> RunConfig:
    """The config of a small float64 run on so many ranks."""
    config = load_config(overrides=[*SMALL_RUN, *options], ranks=ranks)
    return with_device_defaults(config, "cpu")


def run_trainings(configs: Sequence[RunConfig], measure: Callable[[RankTraining], T]) -> list[list[T]]:
    """Trains every config on the same forked ranks, one after the other; returns what `measure` returns, by config and
    then by rank.
    """
    ranks = validate(configs[0])[0].ranks
    by_rank: list[list[T]] = run_ranks(measure_configs, ranks, list(configs), measure)
    return [list(of_config) for of_config in zip(*by_rank, strict=True)]


def measure_configs(world: World, configs: list[RunConfig], measure: Callable[[RankTraining], T]) -> list[T]:
    return [measure(RankTraining(world, config)) for config in configs]


def count_layouts(ranks: int, layouts: Mapping[str, Sequence[str]]) -> dict[str, list[CountedStep]]:
    """Counts a step of every layout, given by its options; returns the counts by layout and then by rank."""
    configs = [small_config(ranks, *options) for options in layouts.values()]
    return dict(zip(layouts, run_trainings(configs, RankTraining.count), strict=True))
