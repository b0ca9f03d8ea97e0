"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from meshwright.base.config import ScheduleConfig
from meshwright.errors import ConfigError

ScheduleFunction = Callable[[int, int], float]
"""(step, counted from 0; steps of the run) -> the learning rate of the step, as a multiple of `optimizer.lr`."""


def learning_rate(
    step: int, steps: int, peak: float, schedule: ScheduleConfig, function: ScheduleFunction | None = None
) -> float:
    """Returns the learning rate of a step (counted from 0) in a run of `steps` steps. `function` is the user's."""
    if function is not None:
        return peak * user_factor(function, step, steps)
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    start = max(schedule.warmup, steps - round(schedule.decay * steps)) if schedule.kind == "wsd" else schedule.warmup
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return peak * (schedule.floor + (1 - schedule.floor) * shape)


def user_factor(function: ScheduleFunction, step: int, steps: int) -> float:
    """Returns the factor that the user's schedule gives a step. Raises a ConfigError unless it is a finite number."""
    value: Any = function(step, steps)
    number = float(value) if isinstance(value, int | float) or getattr(value, "ndim", 1) == 0 else math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(
            f"the schedule returned {value!r} for step {step} of {steps}",
            "expected the learning rate as a multiple of optimizer.lr: a finite number, at least 0",
        )
    return number


def check_schedule(function: ScheduleFunction, steps: int) -> None:
    """Raises a ConfigError if a schedule is not a function of the step alone: a resumed run calls it from another step
    on.
    """
    probes = sorted({0, 1, steps // 3, steps // 2, max(0, steps - 1)})
    forward = {step: user_factor(function, step, steps) for step in probes}
    backward = {step: user_factor(function, step, steps) for step in reversed(probes)}
    for step in probes:
        if forward[step] != backward[step]:
            raise ConfigError(
                f"the schedule returned {forward[step]:g} and {backward[step]:g} for step {step} of {steps}",
                "expected a function of (step, steps) alone, without state and randomness",
            )
