"""Checks the learning rate of every step of the user's own run against the definition of the schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator

from meshwright.base.config import RunConfig
from meshwright.core.optim.schedule import learning_rate
from meshwright.prover.claims import Claim
from meshwright.prover.oracle.optimizer import learning_rate as expected_rate

MAX_STEPS = 20_000
"""The most steps that are compared; of a longer run, both ends, the ends of the phases and random steps."""
BORDER = 50
TOLERANCE = 1e-12


def check_schedule(config: RunConfig) -> Iterator[Claim]:
    """Compares the rates of the run's steps, which are all of them unless the run is long."""
    schedule, peak, steps = config.schedule, config.optimizer.lr, compared_steps(config)
    number = "every step" if len(steps) == config.steps else f"{len(steps):,} steps"
    claim = f"the learning rate of {number} is that of the schedule"
    for step in steps:
        found, right = (rate(step, config.steps, peak, schedule) for rate in (learning_rate, expected_rate))
        if abs(found - right) > TOLERANCE * max(abs(right), peak * TOLERANCE):
            yield Claim(claim, False, f"step {step} of {config.steps}: {found!r}, expected {right!r} ({schedule.kind})")
            return
    yield Claim(
        claim, True, f"{len(steps):,} of {config.steps:,} steps of {schedule.kind}, {schedule.warmup:,} of warm-up"
    )


def compared_steps(config: RunConfig) -> list[int]:
    if config.steps <= MAX_STEPS:
        return list(range(config.steps))
    decay = config.steps - round(config.schedule.decay * config.steps)
    borders = (0, config.schedule.warmup, decay, config.steps)
    near = {step for border in borders for step in range(border - BORDER, border + BORDER)}
    near |= set(random.Random(config.seed).sample(range(config.steps), MAX_STEPS // 2))
    return sorted(step for step in near if 0 <= step < config.steps)
