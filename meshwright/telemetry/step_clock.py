"""One step as timed phases: entering a phase ends the one before. On CUDA the stamps are events, and nothing waits
for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from meshwright import faults
from meshwright.telemetry.heartbeat import Heartbeat

PHASES = ("fetch", "copy", "forward", "backward", "sync", "update")


class StepClock:
    """Stamps of one step. `seconds` may be asked once the device has passed the last stamp."""

    def __init__(
        self,
        device: torch.device,
        page: Heartbeat | None = None,
        step: int = 0,
        watch: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        self._page, self._step, self._watch = page or Heartbeat(), step, watch
        self._cuda = device.type == "cuda"
        self._stamps: list[tuple[str, float | torch.cuda.Event]] = []

    def enter(self, phase: str) -> str:
        """A phase begins: the page says so to whoever watches, and a fault may be waiting here. Gives what the fault
        leaves to the caller.
        """
        self._stamps.append((phase, self._now()))
        self._page.enter(phase, self._step)
        self._watch(phase)
        return faults.fail_point(f"step.{phase}", self._step)

    def close(self) -> None:
        self._stamps.append(("", self._now()))

    def wait(self) -> None:
        """Until the device has passed the last stamp; later work goes on."""
        last = self._stamps[-1][1]
        if not isinstance(last, float):
            last.synchronize()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; a phase entered several times is the sum of its stays."""
        spent = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._stamps, self._stamps[1:], strict=False):
            if isinstance(start, float):
                assert isinstance(end, float)
                spent[phase] += end - start
            else:
                spent[phase] += start.elapsed_time(end) / 1e3  # type: ignore[arg-type]
        return {phase: round(value, 7) for phase, value in spent.items()}

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
