"""Phases add up to the step, and entering one ends the previous one."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.records.phases import STEP_PHASES
from meshwright.core.telemetry import step_clock
from meshwright.core.telemetry.step_clock import StepClock


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


class DeviceTime:
    """A CUDA event that the device has passed at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def elapsed_time(self, later: DeviceTime) -> float:
        return (later.seconds - self.seconds) * 1e3


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        (105.0, 110.0),  # the host is ahead of the device: the begin of the previous step counts
        (111.0, 111.0),  # a device does not begin a step before the host queues it
        (100.0, 110.0),
    ],
)
def test_step_on_a_device_begins_after_the_previous_one(monkeypatch, queued, expected):
    clocks = []
    for begin, first in ((100.0, 5.0), (queued, 15.0)):
        clock = StepClock(torch.device("cpu"))
        clock.close()
        clock.begin, clock._stamps = begin, [("fetch", DeviceTime(first)), ("", DeviceTime(first + 1.0))]
        clocks.append(clock)
    monkeypatch.setattr(step_clock.time, "time", lambda: 1000.0)
    clocks[1].follow(clocks[0])
    assert clocks[1].begin == pytest.approx(expected)
    assert clocks[1].span() == {"phases": [("fetch", 0)], "end": 1_000_000, "waits": []}
    monkeypatch.setattr(step_clock.time, "time", lambda: 108.0)  # the drift of the device's clock is bounded
    clocks[1].follow(clocks[0])
    assert clocks[1].begin == pytest.approx(107.0)
