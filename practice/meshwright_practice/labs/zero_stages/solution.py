"""Lab: ZeRO-1, ZeRO-2 and ZeRO-3 on raw collectives. The reference solution."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTUM = 0.9


def update(shard: Tensor, gradient: Tensor, moment: Tensor, lr: float) -> None:
    """SGD with momentum on one shard, in place."""
    moment.mul_(MOMENTUM).add_(gradient)
    shard.sub_(lr * moment)


def own_chunk(tensor: Tensor) -> Tensor:
    """The chunk of this rank, as a view."""
    return tensor.detach().view(-1).chunk(dist.get_world_size())[dist.get_rank()]


def reduce_mean(shard: Tensor, full: Tensor) -> None:
    """The shard becomes this rank's chunk of the mean."""
    dist.reduce_scatter_tensor(shard, full.reshape(-1))
    shard /= dist.get_world_size()


def gather(shard: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The full tensor, of which every rank has one shard."""
    full = shard.new_empty(shape)
    dist.all_gather_into_tensor(full.view(-1), shard)
    return full


def zero1_step(weights: list[Tensor], gradients: list[Tensor], moments: list[Tensor], lr: float) -> None:
    """A reduce-scatter and an all-gather: together the bytes of one all-reduce."""
    for weight, gradient, moment in zip(weights, gradients, moments, strict=True):
        shard = torch.empty_like(moment)
        reduce_mean(shard, gradient)
        zero2_step([weight], [shard], [moment], lr)


def zero2_attach(weights: list[Tensor], gradient_shards: list[Tensor]) -> None:
    """Full gradients live only until their hook has run."""

    def on_gradient(shard: Tensor, weight: Tensor) -> None:
        if weight.grad is not None:
            reduce_mean(shard, weight.grad)
            weight.grad = None

    for weight, shard in zip(weights, gradient_shards, strict=True):
        weight.register_post_accumulate_grad_hook(partial(on_gradient, shard))


def zero2_step(weights: list[Tensor], gradient_shards: list[Tensor], moments: list[Tensor], lr: float) -> None:
    """Each rank updates its chunk of every weight, and gets the others'."""
    for weight, gradient, moment in zip(weights, gradient_shards, moments, strict=True):
        chunk = own_chunk(weight)
        update(chunk, gradient, moment, lr)
        dist.all_gather_into_tensor(weight.detach().view(-1), chunk.clone())  # input and output must not overlap


class GatheredLinear(torch.autograd.Function):
    """A linear layer whose weight is gathered before each use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, out_features: int) -> Tensor:
        ctx.save_for_backward(x, shard)  # not the weight: it is gathered again
        weight = gather(shard, (out_features, x.shape[-1]))
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_y,) = gradients
        x, shard = ctx.saved_tensors
        grad_shard = torch.empty_like(shard)
        reduce_mean(grad_shard, grad_y.T @ x)
        return grad_y @ gather(shard, (grad_y.shape[-1], x.shape[-1])), grad_shard, None


def zero3_linear(x: Tensor, shard: Tensor, out_features: int) -> Tensor:
    """x @ weight.T with a sharded weight: two gathers and one reduce-scatter per step."""
    result: Tensor = GatheredLinear.apply(x, shard, out_features)  # type: ignore[no-untyped-call]
    return result
