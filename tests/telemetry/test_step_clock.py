"""Phases add up to the step, and entering one ends the previous one."""

from __future__ import annotations

import torch

from meshwright.telemetry import step_clock
from meshwright.telemetry.phases import STEP_PHASES
from meshwright.telemetry.step_clock import StepClock


def test_step_clock_sums_the_seconds_of_every_phase(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    for phase in ("fetch", "forward", "backward", "forward", "update"):
        clock.enter(phase)
    clock.close()
    assert clock.seconds() == {
        "fetch": 1.0,
        "copy": 0.0,
        "forward": 2.0 + 4.0,
        "backward": 3.0,
        "sync": 0.0,
        "update": 5.0,
    }
    assert tuple(clock.seconds()) == STEP_PHASES
