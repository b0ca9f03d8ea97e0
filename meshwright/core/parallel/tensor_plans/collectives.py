"""The differentiable collectives of tensor parallelism, between replicated activations and local shards of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def enter_shards(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A replicated activation for modules that work on shards: backward sums its partial gradients over the ranks.

    Modules that get the same tensor share one sum, as q, k and v do.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if not hasattr(x, "_entered_shards"):
        x._entered_shards = EnterShards.apply(x, group)  # type: ignore[attr-defined,no-untyped-call]
    return x._entered_shards  # type: ignore[attr-defined,no-any-return]


def sum_shards(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of partial results over the ranks, which is replicated."""
    return SumShards.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def gather_shards(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shards of the last dimension of all ranks, which is replicated."""
    return GatherShards.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def split_to_shards(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's shard of the last dimension of a replicated activation."""
    return SplitToShards.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


class EnterShards(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class SumShards(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherShards(torch.autograd.Function):
    """All-gather forward, own shard backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_shard(gradient, ctx.group), None


class SplitToShards(torch.autograd.Function):
    """Own shard forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_shard(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.group), None


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shards of the last dimension of all ranks, in rank order."""
    x = x.contiguous()
    shards = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(shards, x, group=group)
    return torch.cat(shards, dim=-1)


def own_shard(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()
