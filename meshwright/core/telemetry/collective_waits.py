"""Measures how long the training thread waits for other ranks inside collectives, in every phase of a step.

Under FSDP2, tensor, context and expert parallelism, ranks wait for each other inside forward and backward. The step
clock alone would count that as computation, and a slow rank would make every other rank look as slow as itself.

On CPU a wait blocks the training thread, and its duration is exposed communication. On CUDA a wait blocks the current
stream: events before and after it measure how long, and nothing waits for the measurement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.core.torch_private import inside_backward, wrap_collective_waits

Stamp = float | torch.cuda.Event

_active: list[WaitTimer] = []
"""The timer of the step that runs; at most one."""


class WaitTimer:
    """The waits of one step; `phase` is the phase that the step is in."""

    def __init__(self, cuda: bool) -> None:
        self.phase = ""
        self.stamps: list[tuple[str, Stamp, Stamp]] = []
        """(phase, begin, end) of every wait, in order"""
        self._inside = False
        self._thread = threading.get_ident()
        self._stream = torch.cuda.current_stream() if cuda else None

    def start(self) -> None:
        wrap_collective_waits(timed_wait)
        _active[:] = [self]

    def stop(self) -> None:
        _active.clear()

    def counts(self, args: tuple[Any, ...]) -> bool:
        """Whether a wait is one of the training: checkpoints are saved by another thread, and on CUDA other streams
        wait as well. Backward runs on a thread of autograd there.
        """
        if self._inside or (threading.get_ident() != self._thread and not inside_backward()):
            return False
        if self._stream is None:
            return True
        waiting = args[0] if args and isinstance(args[0], torch.cuda.Stream) else torch.cuda.current_stream()
        return bool(waiting == self._stream)

    def measure(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, self._inside = self.now(), True  # a wait may call another one
        try:
            return wait(*args, **kwargs)
        finally:
            self.stamps.append((self.phase, begin, self.now()))
            self._inside = False

    def now(self) -> Stamp:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the waits by phase, without `sync`, which is a wait as a whole."""
        seconds: dict[str, float] = {}
        for phase, begin, end in self.stamps:
            if phase != "sync":
                seconds[phase] = seconds.get(phase, 0.0) + elapsed(begin, end)
        return {phase: round(value, 7) for phase, value in seconds.items()}


def elapsed(begin: Stamp, end: Stamp) -> float:
    """Returns the seconds between two stamps of the same kind."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    return begin.elapsed_time(end) / 1e3  # type: ignore[no-any-return,arg-type]


def timed_wait(wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `wait`, and measures it if a step runs. A compiled region is traced without the measurement."""
    if torch.compiler.is_compiling() or not _active or not _active[0].counts(args):
        return wait(*args, **kwargs)
    return _active[0].measure(wait, *args, **kwargs)
