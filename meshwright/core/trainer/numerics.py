"""Numerical diagnostics: the gradient noise scale, and the module whose output is not finite first."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.data.loader import MicroBatch
from meshwright.core.models.layers.experts import Experts
from meshwright.core.parallel.local_shard import local_tensor
from meshwright.core.parallel.parallel_model import ParallelModel, unchanged_module
from meshwright.core.parallel.sync_batch_norm import GroupBatchNorm


class NoiseScale:
    """Estimates the simple gradient noise scale, in samples: the batch size beyond which averaging helps little.

    The estimate uses the squared gradient norms of a small batch (one rank's) and of the global batch. Numerator and
    denominator are smoothed separately before their ratio is taken (McCandlish et al., "An empirical model of
    large-batch training", 2018, appendix A).
    """

    def __init__(self, global_batch: int, replicas: int, smoothing: float = 0.95) -> None:
        self.big, self.small = global_batch, global_batch / replicas
        self.replicas, self.smoothing = replicas, smoothing
        self.signal = self.noise = 0.0

    def to_json(self) -> dict[str, float]:
        return {"signal": self.signal, "noise": self.noise}

    def restore(self, values: dict[str, float]) -> None:
        self.signal, self.noise = values["signal"], values["noise"]

    def update(self, norm: float, local_square: float) -> float | None:
        """Returns the smoothed estimate; None on one rank, without a local gradient, or without a positive signal."""
        if self.replicas == 1 or not math.isfinite(local_square):
            return None
        big = norm**2
        small = local_square
        signal = (self.big * big - self.small * small) / (self.big - self.small)
        noise = (small - big) / (1 / self.small - 1 / self.big)
        keep = self.smoothing if self.noise else 0.0
        self.signal = keep * self.signal + (1 - keep) * signal
        self.noise = keep * self.noise + (1 - keep) * noise
        return self.noise / self.signal if self.signal > 0 else None


def first_nonfinite(
    parallel_model: ParallelModel,
    batches: list[MicroBatch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
) -> str | None:
    """Returns the first module, in the order of computation, whose output is not finite on these batches; else the
    first parameter, in the order of backward, with such a gradient. Where forward passes are collective, no rank may
    stop early, and gradients are not computed.
    """
    model = parallel_model.module
    synchronized = any(isinstance(module, GroupBatchNorm) for module in model.modules())
    collective = parallel_model.forward_is_collective or synchronized
    modules: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not modules and not all_finite(output):
                modules.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(watch(name or type(module).__name__)) for name, module in leaves]
    handles.append(model.register_forward_hook(watch("the loss")))
    try:
        with (
            unchanged_module(model),
            autocast(),
            parallel_model.micro_step(last=True),
            torch.set_grad_enabled(not collective),
        ):
            for batch in batches:
                total = parallel_model.forward_loss(*(t.to(device) for t in parallel_model.shard_inputs(batch.tensors)))
                if collective:
                    continue
                if modules:
                    return modules[0]
                names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)  # leaves .grad untouched
                bad = [name for name, gradient in zip(names, gradients, strict=True) if not all_finite(gradient)]
                if bad:  # backward runs from the last module to the first
                    return f"{bad[-1]} (in backward)"
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            if isinstance(module, Experts):
                module.take_load()  # this pass belongs to no step
    parallel_model.reshard()
    return modules[0] if modules else None


def all_finite(value: Any) -> bool:
    """Whether every floating-point tensor in a nested output is finite."""
    if isinstance(value, Tensor):
        value = local_tensor(value)
        return bool(torch.isfinite(value).all()) if value.is_floating_point() else True
    if isinstance(value, (tuple, list)):
        return all(all_finite(v) for v in value)
    return all(all_finite(v) for v in value.values()) if isinstance(value, dict) else True
