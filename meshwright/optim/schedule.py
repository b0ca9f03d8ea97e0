"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from meshwright.config import ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Returns the learning rate of a step (counted from 0) in a run of `steps` steps."""
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    start = max(schedule.warmup, steps - round(schedule.decay * steps)) if schedule.kind == "wsd" else schedule.warmup
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return peak * (schedule.floor + (1 - schedule.floor) * shape)
