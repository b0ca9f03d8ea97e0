"""Records one step on one rank in detail: gradients, updates and the outputs of modules. It changes no number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.data.loader import MicroBatch
from meshwright.core.parallel.local_shard import local_shard, local_tensor
from meshwright.core.trainer.job import TrainingObserver
from meshwright.core.trainer.loop import Training


@dataclass
class ShardFigures:
    """What one rank measured of its shard of a parameter; squares are summed over elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    layer: str
    gradient_square: float = 0.0
    largest_gradient: float = 0.0
    nonfinite_gradients: int = 0
    weight_square: float = 0.0
    update_square: float = 0.0


@dataclass
class OutputFigures:
    """What one rank measured of the outputs of a module."""

    block: bool
    square: Tensor
    largest: Tensor
    nonfinite: Tensor
    elements: int = 0


@dataclass
class RankDetail:
    """The step as one rank saw it."""

    rank: int
    parameters: dict[str, ShardFigures] = field(default_factory=dict)
    modules: dict[str, tuple[bool, float, float, int, int]] = field(default_factory=dict)
    """name -> (block, square, largest, nonfinite, elements), in the order of computation"""


class DetailRecorder(TrainingObserver):
    """Measures step `step`; `watch_modules` is the context of the step, and `finish` follows it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.detail = RankDetail(0)
        self.before: dict[str, Tensor] = {}
        self.outputs: dict[str, OutputFigures] = {}

    def on_start(self, training: Training) -> None:
        self.training = training
        self.detail.rank = training.world.rank
        self.patterns = training.parallel_model.block_patterns
        self.prefix = training.parallel_model.name_prefix

    def on_gradient(self, step: int, batches: list[MicroBatch]) -> None:  # noqa: ARG002
        if step != self.step:
            return
        scale = float(self.training.precision.scale)
        gradients = self.training.parallel_model.gradients()
        for name, parameter in self.training.parallel_model.parameters().items():
            if not parameter.requires_grad:
                continue
            shard = local_shard(self.training.parameters[name])
            layer = self.short_name(layer_of(name, self.patterns))
            figures = ShardFigures(shard.offset, tuple(shard.local.shape), shard.shape, layer)
            self.before[name] = shard.local.to("cpu", copy=True)  # the device may have no room for a second copy
            figures.weight_square = square(shard.local)
            if name in gradients:
                gradient = local_tensor(gradients[name])
                figures.gradient_square = square(gradient) / scale**2
                figures.largest_gradient = largest(gradient) / scale
                figures.nonfinite_gradients = int((~torch.isfinite(gradient)).sum())
            self.detail.parameters[name] = figures

    @contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Measures the outputs of all modules in the forward passes inside. Where blocks are compiled, a hook would
        compile them anew and change the last bits, so that nothing is measured.
        """
        if self.training.config.compile.enabled:
            yield
            return
        handles = [
            module.register_forward_hook(self._hook(name, is_block(name, self.patterns)))
            for name, module in self.training.module.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, block: bool) -> Any:
        @torch.no_grad()
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in floating_tensors(output):
                figures = self.outputs.get(name)
                if figures is None:
                    zero = torch.zeros((), dtype=torch.float64, device=tensor.device)
                    figures = self.outputs[name] = OutputFigures(block, zero, zero.clone(), zero.clone())
                if tensor.numel():
                    figures.square += torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2
                    figures.largest = torch.maximum(figures.largest, tensor.abs().max().double())
                    figures.nonfinite += (~torch.isfinite(tensor)).sum()
                    figures.elements += tensor.numel()

        return hook

    def finish(self) -> RankDetail:
        """Measures the update, and returns everything with the user's names."""
        for name, before in self.before.items():
            after = local_shard(self.training.parameters[name]).local.cpu()
            self.detail.parameters[name].update_square = square(after.double() - before.double())
        self.detail.parameters = {self.short_name(n): figures for n, figures in self.detail.parameters.items()}
        self.detail.modules = {
            self.short_name(name): (f.block, float(f.square), float(f.largest), int(f.nonfinite), f.elements)
            for name, f in self.outputs.items()
        }
        return self.detail

    def short_name(self, name: str) -> str:
        """The user's name of a parameter or module of a custom model."""
        return name.removeprefix(self.prefix)


def square(tensor: Tensor) -> float:
    """The sum of squares, in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 if tensor.numel() else 0.0


def largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a nested output, as this rank has them."""
    if isinstance(value, Tensor):
        value = local_tensor(value)
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from floating_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from floating_tensors(item)


def is_block(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.count(".") == pattern.count(".") and fnmatchcase(name, pattern) for pattern in patterns)


def layer_of(name: str, patterns: tuple[str, ...]) -> str:
    """The block that a parameter belongs to; for a parameter outside of the blocks, its module."""
    for pattern in patterns:
        regex = re.escape(pattern).replace(r"\*", r"[^.]+")
        if pattern and (match := re.match(rf"{regex}(?=\.)", name)):
            return match[0]
    return name.rpartition(".")[0] or name
