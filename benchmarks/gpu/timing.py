"""Times contenders in turns on one device, with the memory that each needs and the global state that each set."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

WARMUP = 4
"""Steps after a contender is built: they compile, and choose kernels."""
SETTLE = 0.75
"""Untimed steps at the beginning of a turn, per timed step: the power limit of a card follows a contender within about
three seconds. In shorter turns both run at the clocks of their mean power: the one that needs less power is slower than
by itself, and the other one is faster.
"""


class Contender(Protocol):
    """A training loop that runs one step at a time."""

    def step(self) -> None: ...

    def loss(self) -> float: ...

    def details(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


Build = Callable[[], Contender]


@dataclass(frozen=True)
class GlobalState:
    """The process-wide settings of torch that a contender may change, and that the next one must not see."""

    deterministic: bool
    matmul_precision: str
    attention: tuple[SDPBackend, ...]
    """the backends of scaled_dot_product_attention that may be used, in the order in which they are tried"""
    compile_cache: str
    """what the cache of compiled code is keyed by in addition: it does not know the backends of attention"""

    @classmethod
    def capture(cls) -> GlobalState:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            tuple(_cur_sdpa_kernel_backends(with_priority=True)),
            torch.compiler.config.cache_key_tag,
        )

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.matmul_precision)
        _sdpa_kernel(list(self.attention), set_priority=True)
        torch.compiler.config.cache_key_tag = self.compile_cache


@dataclass(frozen=True)
class Turn:
    """One turn of a contender."""

    seconds: float
    """per step, the mean of the turn"""
    peak: int
    """bytes that the contender had allocated at most"""


@dataclass
class Entrant:
    """A contender that is built and warm, with its turns."""

    contender: Contender
    device: torch.device
    tokens: int
    flops_per_token: int
    state: GlobalState
    setup_seconds: float
    """building, compiling and the warm-up steps"""
    resident: int
    """bytes that it keeps between steps"""
    start_peak: int
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def enter(cls, build: Build, device: torch.device, tokens: int, flops_per_token: int) -> Entrant:
        """Builds a contender and runs its warm-up steps."""
        before, default = allocated(device), GlobalState.capture()
        reset_peak(device)
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            contender = build()
            try:
                for _ in range(WARMUP):
                    contender.step()
                synchronize(device)
            except Exception:
                contender.close()
                raise
            state = GlobalState.capture()
        finally:
            default.restore()
        seconds = time.perf_counter() - begin
        gc.collect()
        resident, peak = allocated(device) - before, peak_allocated(device) - before
        return cls(contender, device, tokens, flops_per_token, state, seconds, resident, peak)

    def run_turn(self, steps: int) -> Turn:
        """Runs a turn: the settling steps, then `steps` that are timed by device events."""
        default = GlobalState.capture()
        self.state.restore()
        reset_peak(self.device)
        others = allocated(self.device) - self.resident
        try:
            for _ in range(math.ceil(SETTLE * steps)):
                self.contender.step()
            with timed(self.device) as seconds:
                for _ in range(steps):
                    self.contender.step()
        finally:
            default.restore()
        turn = Turn(seconds() / steps, peak_allocated(self.device) - others)
        self.turns.append(turn)
        return turn

    def result(self, since: int = 0) -> dict[str, Any]:
        """The figures of the turns from number `since`."""
        seconds = [turn.seconds for turn in self.turns[since:]]
        middle = statistics.median(seconds)
        return {
            "step_ms": round(middle * 1e3, 3),
            "step_ms_range": [round(min(seconds) * 1e3, 3), round(max(seconds) * 1e3, 3)],
            "tokens_per_second": round(self.tokens / middle),
            "tflops": round(self.tokens * self.flops_per_token / middle / 1e12, 2),
            "peak_gib": round(max([self.start_peak, *(turn.peak for turn in self.turns)]) / 2**30, 3),
            "peak_gib_of_steps": round(max(turn.peak for turn in self.turns) / 2**30, 3),
            "resident_gib": round(self.resident / 2**30, 3),
            "setup_seconds": round(self.setup_seconds, 1),
            "loss": round(self.contender.loss(), 4),
            **self.contender.details(),
        }

    def leave(self) -> None:
        """Ends the contender and frees its memory."""
        self.contender.close()
        del self.contender
        free_memory(self.device)


def ratios(first: list[Turn], second: list[Turn]) -> dict[str, Any]:
    """The speed of the first relative to the second: median, smallest and largest over rounds."""
    values = [b.seconds / a.seconds for a, b in zip(first, second, strict=True)]
    return {"median": round(statistics.median(values), 4), "range": [round(min(values), 4), round(max(values), 4)]}


@contextmanager
def timed(device: torch.device) -> Iterator[Callable[[], float]]:
    """Yields a function that returns the seconds of the block once it has ended."""
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield lambda: first.elapsed_time(last) / 1e3
        last.record()
        last.synchronize()
    else:
        stamps = [time.perf_counter()]
        yield lambda: stamps[1] - stamps[0]
        stamps.append(time.perf_counter())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak_allocated(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
