"""Whether frozen parameters keep their bits: real steps of low-rank adaptation change the factors and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.core.checkpoint.frozen import frozen_digest, separate_frozen
from meshwright.core.data.loader import Loader
from meshwright.core.data.source import ConcatenatedSource, SyntheticSource
from meshwright.core.data.stream import Stream
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.world import World
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.step import Step, StepContext
from meshwright.prover.claims import Claim
from meshwright.prover.shrink.layouts import small_layouts
from meshwright.prover.shrink.sizes import shrink

SAMPLES, STEPS = 1000, 3
LEARNING_RATE = 0.01
MAX_SECONDS = 300.0


def check_frozen(config: RunConfig) -> Iterator[Claim]:
    """Runs some steps on each small layout of the config, and compares digests of what is frozen and of the factors."""
    for layout_config in small_layouts(config.layout):
        small = shrink(config, layout_config)
        small = replace(small, launch=replace(small.launch, device="cpu"))
        layout = Layout.from_config(layout_config)
        digests = run_ranks(digests_around_steps, layout.ranks, small, launch=small.launch, timeout=MAX_SECONDS)
        (frozen, factors), (frozen_after, factors_after) = digests[0]
        yield Claim(
            f"{layout}: {STEPS} steps change the factors, and no bit of the frozen parameters",
            frozen == frozen_after and factors != factors_after,
            f"frozen parameters {frozen} -> {frozen_after}, factors {factors} -> {factors_after}",
        )


def digests_around_steps(world: World, config: RunConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    """(digest of the frozen parameters, digest of the factors) before and after some steps of this rank."""
    layout, batch = validate(config)
    precision = Precision(config.precision, world.device)
    model = build_parallel_decoder(config, layout, precision, world)
    parameters = model.master_parameters()
    factors, _ = separate_frozen(parameters, config, layout, world)
    frozen = {name: parameter for name, parameter in parameters.items() if name not in factors}
    optimizer = build_optimizer(model.parameters(), config.optimizer, layout, world, masters=model.masters)
    step = Step(StepContext.for_rank(config, layout, world, model, optimizer, precision))
    source = ConcatenatedSource([SyntheticSource(SAMPLES, config.data.sequence, config.model.vocab)])
    stream = Stream.from_lengths(config.seed, batch.global_, [SAMPLES], [1.0], 0.0)
    loader = Loader(source, stream, batch, layout.data_coordinate(world.rank), config.data)

    def digests() -> tuple[str, str]:
        model.reshard()
        return frozen_digest(frozen, layout, world), frozen_digest(factors, layout, world)

    before = digests()
    step.warmup_backward(loader.first)
    batches = loader.steps(0, STEPS)
    for number in range(STEPS):
        step.run(number, LEARNING_RATE, batches)
    return before, digests()
