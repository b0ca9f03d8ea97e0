"""A user's model in one plain process: its module, its loss and torch's autograd, without any parallelism."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.config import IGNORE_INDEX
from meshwright.prover.oracle.optimizer import step_seed
from meshwright.prover.oracle.steps import Batch

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Passes:
    """How the batch of a step is divided into forward passes. Whole batches are the definition. A model whose forward
    depends on the batch, or draws random numbers, is computed as the ranks divide the batch.
    """

    divided: Literal["whole", "micro-batches", "ranks"] = "whole"
    """the whole batch; the micro-batches of all replicas together, as SyncBatchNorm sees them; or those of each one"""
    replicas: int = 1
    """data-parallel degree: each replica has an equal part of the batch, and seeds of its own"""
    micro_batches: int = 1
    """per replica"""
    reverse: bool = False
    """another order of the samples or of the replicas, which changes results by rounding only"""

    def divide(self, samples: int) -> Iterator[tuple[int, int, Tensor]]:
        """(replica, micro-batch, samples) of each forward pass."""
        rows = torch.arange(samples)
        if self.divided == "whole":
            yield 0, 0, rows.flip(0) if self.reverse else rows
            return
        parts = rows.view(self.replicas, self.micro_batches, -1)
        if self.divided == "micro-batches":
            for number, part in enumerate(parts.transpose(0, 1)):
                yield 0, number, part.flip(0).flatten() if self.reverse else part.flatten()
            return
        replicas = list(enumerate(parts))
        for replica, of_replica in reversed(replicas) if self.reverse else replicas:
            for number, part in enumerate(of_replica):
                yield replica, number, part


class PlainModel:
    """The module and the loss as the user wrote them: their hooks, buffers and modes are those of the user's objects.
    Parameters have the names that a run gives them: `model.` or `loss.` and the name in the module.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        passes: Passes,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module, self.loss, self.passes, self.seed = module, loss, passes, seed
        self.dtype, self.low = dtype, autocast
        for part in self.parts().values():
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.data = tensor.data.clone()  # the weights of a job are in memory that all its processes share
            part.to(dtype)
            for child in part.modules():
                if isinstance(child, nn.SyncBatchNorm):  # torch's own forward needs a process group and a device
                    child.__dict__["forward"] = partial(nn.BatchNorm2d.forward, child)

    def parts(self) -> dict[str, nn.Module]:
        """The modules that may have parameters, by the prefix of their names."""
        parts = {"model.": self.module, "loss.": self.loss}
        return {prefix: part for prefix, part in parts.items() if isinstance(part, nn.Module)}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, under the first of its names."""
        named: dict[str, nn.Parameter] = {}
        for prefix, part in self.parts().items():
            known = {id(parameter) for parameter in named.values()}
            named |= {prefix + name: p for name, p in part.named_parameters() if id(p) not in known}
        return named

    def buffers(self) -> dict[str, Tensor]:
        return {prefix + name: b for prefix, part in self.parts().items() for name, b in part.named_buffers()}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Sets parameters or buffers."""
        tensors: dict[str, Tensor] = {**self.parameters(), **self.buffers()}
        for name, value in values.items():
            tensors[name].copy_(value)

    def loss_sum(self, batch: Batch) -> Tensor:
        """The sum of the losses of all valid targets. Floating-point inputs have the dtype of the weights."""
        if self.loss is None:
            raise ValueError("the model computes its loss itself")
        *inputs, targets = (t.to(self.dtype) if t.is_floating_point() else t for t in batch)
        with self.autocast():
            result = self.loss(self.module(*inputs), targets)
        total: Tensor = result[0] if isinstance(result, tuple) else result
        return total

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.low) if self.low is not None else nullcontext()

    def gradient(
        self, parameters: dict[str, Tensor], batch: Batch, scale: float, step: int, /
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """(mean loss over the batch, gradient of every parameter that receives one, no loads), by `backward`."""
        self.load(parameters)
        named = self.parameters()
        for parameter in named.values():
            parameter.grad = None
        valid, total = max(1, self.count_valid(batch)), 0.0
        for replica, number, rows in self.passes.divide(len(batch[0])):
            if number == 0:
                seed_all(step_seed(self.seed, step, replica))
            mean = self.loss_sum(tuple(column[rows] for column in batch)) / valid
            (mean * scale).backward()
            total += float(mean.detach())
        gradients = {name: p.grad.to(parameters[name].dtype) / scale for name, p in named.items() if p.grad is not None}
        return total, gradients, {}

    @torch.no_grad()
    def evaluate(self, parameters: dict[str, Tensor], batch: Batch) -> tuple[float, int]:
        """(mean loss, number of valid targets) in evaluation mode."""
        self.load(parameters)
        modes = [(child, child.training) for part in self.parts().values() for child in part.modules()]
        for part in self.parts().values():
            part.eval()
        total, valid = float(self.loss_sum(batch).double()), self.count_valid(batch)
        for child, mode in modes:
            child.training = mode
        return total / max(1, valid), valid

    def count_valid(self, batch: Batch) -> int:
        """Integer targets other than -100; samples if the targets are no integers."""
        targets = batch[-1]
        return len(targets) if targets.is_floating_point() else int((targets != IGNORE_INDEX).sum())


def seed_all(seed: int) -> None:
    """Seeds every generator of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
