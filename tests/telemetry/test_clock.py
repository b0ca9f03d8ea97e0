"""Phases add up to the step, and entering one ends the one before."""

from __future__ import annotations

import torch

from meshwright.telemetry import step_clock
from meshwright.telemetry.step_clock import PHASES, StepClock


def test_phases_are_the_stays_between_stamps(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(now))
    steps = StepClock(torch.device("cpu"))
    for phase in ("fetch", "forward", "backward", "forward", "update"):
        steps.enter(phase)
    steps.close()
    assert steps.seconds() == {
        "fetch": 1.0,
        "copy": 0.0,
        "forward": 2.0 + 4.0,
        "backward": 3.0,
        "sync": 0.0,
        "update": 5.0,
    }
    assert tuple(steps.seconds()) == PHASES
