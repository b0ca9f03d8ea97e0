"""Observes the user's training on one rank: samples, gradients and collectives per step; kills, delays, fails it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.core.telemetry.comm_counter import CommCounter

GRADIENT_STEPS = 2
"""Steps of which parameters and gradients are kept."""


class InjectedError(RuntimeError):
    """The failure that the checker causes on one rank."""


@dataclass(frozen=True)
class Injection:
    """What the checker does to a run. Steps count from 0."""

    kill_at: int | None = None
    """the optimizer step before which the process kills itself"""
    slow_fetch_at: int | None = None
    slow_loss_at: int | None = None
    delay: float = 0.03
    """seconds of a slow fetch or loss"""
    fail_fetch_at: int | None = None
    """the step at which fetch raises on the last rank"""


@dataclass
class ObservedStep:
    """What one optimizer step did on this rank."""

    samples: list[int]
    reduced_bytes: int = 0
    calls: int = 0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """before the step; only for the first GRADIENT_STEPS steps"""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class ObservedRun:
    """What a run of `train` did on this rank."""

    steps: list[ObservedStep] = field(default_factory=list)
    saves: list[tuple[int, str]] = field(default_factory=list)
    """(optimizer steps done, path) of every save that ended"""
    loads: int = 0
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradient_bytes: int = 0
    save_seconds: float = 0.0
    seconds: float = 0.0


class Recorder:
    """Wraps the functions of a loaded submission. `ledger` is a file that survives a kill: one JSON line per step."""

    def __init__(self, module: ModuleType, injection: Injection, ledger: Path | None = None) -> None:
        self.module, self.injection, self.ledger = module, injection, ledger
        self.trace = ObservedRun()
        self.model: torch.nn.Module | None = None
        self._samples: list[int] = []
        self._counter = CommCounter({})
        self._counted = (0, 0)

    @contextmanager
    def recording(self) -> Iterator[ObservedRun]:
        names = [name for name in ("build_model", "fetch", "loss", "save", "load") if hasattr(self.module, name)]
        originals = {name: getattr(self.module, name) for name in names}
        for name in names:
            setattr(self.module, name, getattr(self, f"_{name}")(originals[name]))
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        begin = time.perf_counter()
        try:
            with self._counter:
                yield self.trace
        finally:
            self.trace.seconds = time.perf_counter() - begin
            for hook in hooks:
                hook.remove()
            for name, original in originals.items():
                setattr(self.module, name, original)
            if self.model is not None:
                self.trace.final = copies(self.model, lambda parameter: parameter)
                self.trace.gradient_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _build_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def build_model(*args: Any, **kwargs: Any) -> Any:
            self.model = original(*args, **kwargs)
            return self.model

        return build_model

    def _fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(indices: Any, *args: Any, **kwargs: Any) -> Any:
            step = len(self.trace.steps)
            if self.injection.fail_fetch_at == step and is_last_rank():
                raise InjectedError("the checker makes this rank fail")
            indices = [int(index) for index in indices]
            self._samples += indices
            if self.injection.slow_fetch_at == step:
                time.sleep(self.injection.delay)
            return original(indices, *args, **kwargs)

        return fetch

    def _loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*args: Any, **kwargs: Any) -> Any:
            if self.injection.slow_loss_at == len(self.trace.steps):
                time.sleep(self.injection.delay)
            return original(*args, **kwargs)

        return loss

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(path: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(path, *args, **kwargs)
            self.trace.save_seconds = time.perf_counter() - begin
            self.trace.saves.append((len(self.trace.steps), str(path)))
            self._write({"saved": len(self.trace.steps), "path": str(path)})
            return result

        return save

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            self.trace.loads += 1
            return original(*args, **kwargs)

        return load

    def _before_step(self, *_: Any) -> None:
        index = len(self.trace.steps)
        if self.injection.kill_at == index:
            os.kill(os.getpid(), signal.SIGKILL)
        total, calls = self._volume()
        step = ObservedStep(self._samples, total - self._counted[0], calls - self._counted[1])
        if index < GRADIENT_STEPS and self.model is not None:
            step.parameters = copies(self.model, lambda parameter: parameter)
            step.gradients = copies(self.model, lambda parameter: parameter.grad)
        self._counted = self._volume()  # what gathering shards for the copies has added does not count
        self._samples = []
        self._pending = step

    def _after_step(self, *_: Any) -> None:
        self.trace.steps.append(self._pending)
        self._write({"step": len(self.trace.steps), "samples": self._pending.samples})

    def _volume(self) -> tuple[int, int]:
        """Bytes of gradients that collectives have reduced so far; a gather of all ranks' tensors counts as one."""
        total = calls = 0
        for row in self._counter.rows():
            if row.collective in ("all_reduce", "reduce_scatter", "reduce"):
                total, calls = total + row.message_bytes, calls + row.calls
            elif row.collective in ("all_gather", "gather"):
                total, calls = total + row.message_bytes // row.ranks, calls + row.calls
        return total, calls

    def _write(self, line: dict[str, Any]) -> None:
        if self.ledger is not None:
            with self.ledger.open("a") as file:
                file.write(json.dumps(line) + "\n")


def is_last_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1


def copies(model: torch.nn.Module, value: Callable[[torch.nn.Parameter], Any]) -> dict[str, torch.Tensor]:
    """Copies of a value of every parameter; the shards of a DTensor are gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        tensor = value(parameter)
        if tensor is None:
            continue
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = full.detach().cpu().clone()
    return found
