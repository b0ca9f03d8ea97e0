"""A user's model in one plain process: its module, its loss and torch's autograd, without any parallelism."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.prover.oracle.optimizer import step_seed
from meshwright.prover.oracle.plain_objective import PlainObjective, named_entries
from meshwright.prover.trace import join_rows

Samples = Sequence[Any]
"""samples as their source returns them"""


@dataclass(frozen=True)
class BatchDivision:
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
        if self.divided == "micro-batches":
            parts = rows.view(self.replicas, self.micro_batches, -1)
            for number, part in enumerate(parts.transpose(0, 1)):
                yield 0, number, part.flip(0).flatten() if self.reverse else part.flatten()
            return
        yield from self.cells(samples)

    def cells(self, samples: int) -> Iterator[tuple[int, int, Tensor]]:
        """(replica, micro-batch, samples) of each micro-batch of a rank."""
        replicas = list(enumerate(torch.arange(samples).view(self.replicas, self.micro_batches, -1)))
        for replica, of_replica in reversed(replicas) if self.reverse else replicas:
            for number, part in enumerate(of_replica):
                yield replica, number, part


class PlainModel:
    """The module and the loss as the user wrote them: their hooks, buffers and modes are those of the user's objects.
    Parameters have the names that a run gives them: `model.` or `loss.` and the name in the module.
    """

    def __init__(
        self,
        objective: PlainObjective,
        passes: BatchDivision,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        autocast: torch.dtype | None = None,
        rounds_weights: bool = False,
    ) -> None:
        self.objective, self.passes, self.seed = objective, passes, seed
        self.dtype, self.low = dtype, autocast
        self.rounds_weights = rounds_weights and not self.has_running_statistics()
        """whether the weights that a forward pass uses are the parameters rounded to bf16"""
        for part in self.parts().values():
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.data = tensor.data.clone()  # the weights of a job are in memory that all its processes share
            part.to(dtype)
            for child in part.modules():
                if isinstance(child, nn.SyncBatchNorm):  # torch's own forward needs a process group and a device
                    child.__dict__["forward"] = partial(nn.BatchNorm2d.forward, child)

        if self.rounds_weights and autocast is not None:
            for parameter in self.parameters().values():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
                    parameter.grad_dtype = torch.float32

    def has_running_statistics(self) -> bool:
        """Whether the module has a BatchNorm, whose statistics are float32; such a model keeps its weights so."""
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        return any(isinstance(child, kinds) for part in self.parts().values() for child in part.modules())

    def parts(self) -> dict[str, nn.Module]:
        """The modules that may have parameters, by the prefix of their names."""
        parts = {"model.": self.objective.module, "loss.": self.objective.loss}
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
            rounds = self.rounds_weights and isinstance(tensors[name], nn.Parameter) and tensors[name].requires_grad
            tensors[name].copy_(value.to(torch.bfloat16) if rounds else value)

    def loss_sum(self, samples: Samples, auxiliary: bool = True) -> Tensor:
        """The sum of the losses of all valid targets of these samples, computed together."""
        with self.autocast():
            return self.objective.total(self.objective.batch(samples), self.dtype, auxiliary)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.low) if self.low is not None else nullcontext()

    def gradient(
        self, parameters: dict[str, Tensor], samples: Samples, scale: float, step: int, /
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """(mean loss over the batch, gradient of every parameter that receives one, no loads), by `backward`."""
        self.load(parameters)
        named = self.parameters()
        for parameter in named.values():
            parameter.grad = None
        valid, total = max(1, self.count_valid_targets(samples)), 0.0
        for replica, number, rows in self.passes.divide(len(samples)):
            if number == 0:
                seed_all(step_seed(self.seed, step, replica))
            mean = self.loss_sum([samples[row] for row in rows.tolist()]) / valid
            (mean * scale).backward()
            total += float(mean.detach())
        gradients = {name: p.grad.to(parameters[name].dtype) / scale for name, p in named.items() if p.grad is not None}
        return total, gradients, {}

    @torch.no_grad()
    def evaluate(self, parameters: dict[str, Tensor], samples: Samples, /) -> tuple[float, int]:
        """(mean loss, number of valid targets) in evaluation mode."""
        self.load(parameters)
        modes = [(child, child.training) for part in self.parts().values() for child in part.modules()]
        for part in self.parts().values():
            part.eval()
        total, valid = float(self.loss_sum(samples, auxiliary=True).double()), self.count_valid_targets(samples)
        for child, mode in modes:
            child.training = mode
        return total / max(1, valid), valid

    def count_valid_targets(self, samples: Samples, /) -> int:
        return self.objective.count(self.objective.batch(samples))

    def inputs(self, samples: Samples, /) -> dict[str, Tensor]:
        """The entries of the micro-batches of all ranks, in global order."""
        forward_passes = replace(self.passes, reverse=False)
        cells = [[samples[row] for row in rows.tolist()] for _, _, rows in forward_passes.cells(len(samples))]
        batches = [named_entries(self.objective.batch(cell)) for cell in cells]
        return {name: join_rows([batch[name] for batch in batches]) for name in batches[0]}


def seed_all(seed: int) -> None:
    """Seeds every generator of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
