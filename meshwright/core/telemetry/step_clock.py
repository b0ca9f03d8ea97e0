"""Times the phases of one step; on CUDA by events, for which nothing waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.phases import STEP_PHASES
from meshwright.core import faults
from meshwright.core.telemetry.collective_waits import Stamp, WaitTimer, elapsed


class StepClock:
    """The time stamps of one step: entering a phase ends the previous one. `seconds` may be read once the device has
    passed the last stamp.
    """

    def __init__(
        self,
        device: torch.device,
        heartbeat: Heartbeat | None = None,
        step: int = 0,
        on_phase: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        self._heartbeat, self._step, self._on_phase = heartbeat or Heartbeat(), step, on_phase
        self.begin = time.time()
        """Unix seconds at which the step begins; on CUDA, until `follow`, when the host begins to queue it"""
        self.outside: dict[str, float] = {}
        """seconds in each phase between the previous step and this one"""
        self.waits = WaitTimer(device.type == "cuda")
        self._stamps: list[tuple[str, Stamp]] = []
        self.waits.start()

    def enter(self, phase: str) -> str:
        """Begins a phase, writes it to the heartbeat and reaches its fail point. Returns the action that an injected
        fault leaves to the caller, or an empty string.
        """
        self._stamps.append((phase, self.waits.now()))
        self.waits.phase = phase
        self._heartbeat.enter(phase, self._step)
        if len(self._stamps) == 1:
            self.outside = self._heartbeat.take_outside()
        self._on_phase(phase)
        return faults.fail_point(f"step.{phase}", self._step)

    def close(self) -> None:
        """Ends the last phase."""
        self._stamps.append(("", self.waits.now()))
        self.waits.stop()

    def wait(self) -> None:
        """Waits until the device has passed the last stamp; work queued later continues."""
        last = self._stamps[-1][1]
        if not isinstance(last, float):
            last.synchronize()

    def follow(self, previous: StepClock | None) -> None:
        """On CUDA, sets `begin` to when the device began the step: the begin of the previous step plus what passed on
        the device, not before the host queued the step, and not so late that the step would end in the future.
        """
        first, last = self._stamps[0][1], self._stamps[-1][1]
        if previous is not None and not isinstance(first, float):
            chained = previous.begin + elapsed(previous._stamps[0][1], first)
            self.begin = min(max(self.begin, chained), time.time() - elapsed(first, last))

    def span(self) -> dict[str, Any]:
        """Returns the order of events in microseconds since the first phase: when each phase begins and the last one
        ends, and the begin and end of every wait inside a collective.
        """
        first = self._stamps[0][1]

        def since(stamp: Stamp) -> int:
            return round(elapsed(first, stamp) * 1e6)

        *phases, (_, last) = self._stamps
        return {
            "phases": [(phase, since(stamp)) for phase, stamp in phases],
            "end": since(last),
            "waits": [(since(begin), since(end)) for _, begin, end in self.waits.stamps],
        }

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of every phase; a phase that was entered several times is summed."""
        seconds = dict.fromkeys(STEP_PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._stamps, self._stamps[1:], strict=False):
            seconds[phase] += elapsed(start, end)
        return {phase: round(value, 7) for phase, value in seconds.items()}
