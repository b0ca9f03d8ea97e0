"""The registry of public bugs that trained on wrong gradients in silence, each rebuilt as a small user model or plan.

Every case names the public report. The rebuilt code is ours: it has the mechanism of the report and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.base.config import LayoutConfig
from meshwright.core.parallel.parallel_spec import ParallelSpec
from tests.prover.custom_cases import CustomCase
from tests.prover.custom_faults import rank, ranks
from tests.prover.custom_models import WIDTH, TokenModel, TokenSource, token_loss

REPLICATE = LayoutConfig(replicate=2)
TENSOR = LayoutConfig(replicate=1, tensor=2)
CONTEXT = LayoutConfig(replicate=1, context=2)
EXPERT = LayoutConfig(replicate=2, expert=2)
PIPELINE = LayoutConfig(replicate=1, pipeline=2)


@dataclass(frozen=True)
class PublicBug:
    report: str
    """the public report, as OWNER/REPOSITORY/NUMBER"""
    layout: LayoutConfig
    build: Callable[[], CustomCase]
    expected: tuple[str, ...]
    """what the finding must contain: the axis or the cause, and the parameter"""

    @property
    def link(self) -> str:
        repository, _, number = self.report.rpartition("/")
        return f"https://github.com/{repository}/issues/{number}"


MUSEUM: dict[str, PublicBug] = {}
"""Every public bug, by its name."""


def public_bug(report: str, layout: LayoutConfig, *expected: str) -> Callable:
    """Registers the decorated function, which builds a case, as a public bug."""

    def register(build: Callable[[LayoutConfig], CustomCase]) -> Callable:
        name = build.__name__.replace("_", " ")
        assert name not in MUSEUM
        MUSEUM[name] = PublicBug(report, layout, partial(build, layout), expected)
        return build

    return register


class EvenTokens(TokenSource):
    """Sequences whose length a ring of two ranks divides."""

    def __getitem__(self, index: int):
        tokens, labels = super().__getitem__(index)
        return np.append(tokens, tokens[:2]), np.append(labels, labels[:2])


class AttentionBlock(nn.Module):
    """Causal attention with a residual connection. `attend` is replaced by the cases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        heads = (p(hidden).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class AttentionModel(TokenModel):
    """A token model without positions, so that it can be divided along the sequence."""

    block = AttentionBlock  # type: ignore[assignment]


class Experts(nn.Module):
    """The weights of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / 4)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for expert in range(len(self.up)):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            out = F.gelu(hidden[rows] @ self.up[expert]) @ self.down[expert]
            total = total.index_add(0, rows, out * weights[rows, slots, None])
        return total


class ExpertBlock(nn.Module):
    """A router and its experts, two of four for every token, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(dim=-1).topk(2)
        return x + self.experts(hidden, chosen, self.route(weights, chosen)).view_as(x)

    def route(self, weights: Tensor, _chosen: Tensor) -> Tensor:
        return weights


class ExpertModel(TokenModel):
    block = ExpertBlock  # type: ignore[assignment]


EXPERT_SPEC = ParallelSpec(blocks="blocks.*", experts="blocks.*.experts")


def with_block(model: type[TokenModel], block: type[nn.Module]) -> type[TokenModel]:
    return type(model.__name__, (model,), {"block": block})


def case(layout: LayoutConfig, module: type[TokenModel], loss=token_loss, **fields) -> CustomCase:
    return CustomCase(module(), loss, layout, EvenTokens(), **fields)


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor, whose gradient is multiplied by a factor."""
    return tensor.detach() + (tensor - tensor.detach()) * factor


class SumGradients(torch.autograd.Function):
    """The identity, whose backward adds the gradients of all ranks."""

    @staticmethod
    def forward(_context, x):
        return x.view_as(x)

    @staticmethod
    def backward(_context, gradient):
        total = gradient.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total


class SumValues(torch.autograd.Function):
    """The sum over all ranks, whose backward is the identity."""

    @staticmethod
    def forward(_context, x):
        total = x.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context, gradient):
        return gradient


def local_slice(size: int) -> slice:
    return slice(rank() * size // ranks(), (rank() + 1) * size // ranks())
