"""Times the phases of one step; on CUDA by events, for which nothing waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from meshwright import faults
from meshwright.telemetry.collective_waits import Stamp, WaitTimer, elapsed
from meshwright.telemetry.heartbeat import Heartbeat
from meshwright.telemetry.phases import STEP_PHASES


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
        """Unix seconds at which the step begins; on CUDA, when the host begins to queue it"""
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

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of every phase; a phase that was entered several times is summed."""
        seconds = dict.fromkeys(STEP_PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._stamps, self._stamps[1:], strict=False):
            seconds[phase] += elapsed(start, end)
        return {phase: round(value, 7) for phase, value in seconds.items()}
