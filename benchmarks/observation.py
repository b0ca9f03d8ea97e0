"""The cost of what every step observes and records, as a share of the step time, measured in the same steps.

Observation is the step clock with its phases, the heartbeat, the waits inside collectives, the step record and the
spans. Every call of these is timed in a real training; the share is the sum of their seconds over the step time. The
timing itself adds to the share, which is therefore an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from statistics import median
from typing import Any

from benchmarks.step_bytes import run_training
from meshwright.base.config import load_config
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.core.telemetry.collective_waits import WaitTimer
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.records.step_recorder import StepRecorder

MAX_SHARE = 0.01
RANKS = 2
STEPS = {"tiny": 60, "small": 8}
"""Measured steps of each preset."""
OBSERVATION = (
    (StepClock, "__init__"),
    (StepClock, "enter"),
    (StepClock, "close"),
    (StepRecorder, "add"),
    (Heartbeat, "collective"),
    (Heartbeat, "set_waiting"),
)
"""The methods through which everything is observed; they call the others."""


def measure() -> dict[str, Any]:
    return {preset: measure_preset(preset, steps) for preset, steps in STEPS.items()}


def measure_preset(preset: str, steps: int) -> dict[str, Any]:
    config = load_config(overrides=[f"--preset={preset}", f"--steps={steps + 4}"], ranks=RANKS)
    by_rank = run_training(lambda training: measure_steps(training, steps), config)
    return {
        "step_seconds": round(max(row["step_seconds"] for row in by_rank), 5),
        "microseconds_per_step": round(max(row["seconds"] for row in by_rank) * 1e6, 1),
        "share": round(max(row["share"] for row in by_rank), 5),
        "ranks": RANKS,
        "steps": steps,
    }


def measure_steps(training: Training, steps: int) -> dict[str, float]:
    for _ in range(3):  # the second step of an attempt has counters
        training.run_step()
    rows = []
    with timed_observation() as observed:
        for _ in range(steps):
            observed.clear()
            begin = time.perf_counter()
            training.run_step()
            rows.append((sum(observed), time.perf_counter() - begin))
    return {
        "seconds": median(seconds for seconds, _ in rows),
        "step_seconds": median(step for _, step in rows),
        "share": median(seconds / step for seconds, step in rows),
    }


@contextmanager
def timed_observation() -> Iterator[list[float]]:
    """Times the outermost calls of OBSERVATION, and yields the list that their seconds are appended to."""
    seconds: list[float] = []
    inside = [False]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return method(*args, **kwargs)
            inside[0] = True
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)
                inside[0] = False

        return call

    def timed_wait(self: WaitTimer, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Times what is around the wait itself."""
        begin = time.perf_counter()
        result = measure_wait(self, wait, *args, **kwargs)
        end = time.perf_counter()
        _, first, last = self.stamps[-1]
        assert isinstance(first, float)
        assert isinstance(last, float)
        seconds.append(end - begin - (last - first))
        return result

    originals = [(owner, name, getattr(owner, name)) for owner, name in OBSERVATION]
    measure_wait = WaitTimer.measure
    for owner, name, method in originals:
        setattr(owner, name, timed(method))
    WaitTimer.measure = timed_wait  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)
        WaitTimer.measure = measure_wait  # type: ignore[method-assign]
