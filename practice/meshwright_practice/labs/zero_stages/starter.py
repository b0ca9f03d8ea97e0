"""Lab: ZeRO-1, ZeRO-2 and ZeRO-3 on raw collectives. Replace every `raise NotImplementedError`, and save.

Rank r of N owns the chunk r of every flattened weight: weight.view(-1).chunk(N)[r]. All lengths are multiples of N.
Gradients are averaged over ranks. dist.reduce_scatter_tensor and dist.all_gather_into_tensor are all that you need.
"""

import torch.distributed as dist  # noqa: F401
from torch import Tensor

MOMENTUM = 0.9


def update(shard: Tensor, gradient: Tensor, moment: Tensor, lr: float) -> None:
    """SGD with momentum on one shard, in place. It is given: use it in both steps."""
    moment.mul_(MOMENTUM).add_(gradient)
    shard.sub_(lr * moment)


def zero1_step(weights: list[Tensor], gradients: list[Tensor], moments: list[Tensor], lr: float) -> None:
    """Part 1. `gradients` are the full gradients of this rank's own batch; `moments` are shards."""
    raise NotImplementedError


def zero2_attach(weights: list[Tensor], gradient_shards: list[Tensor]) -> None:
    """Part 2. When the gradient of a weight is ready in backward, its mean over ranks is reduce-scattered into the
    shard of this rank, and weight.grad is set to None.
    """
    raise NotImplementedError


def zero2_step(weights: list[Tensor], gradient_shards: list[Tensor], moments: list[Tensor], lr: float) -> None:
    """Part 2. After backward, the gradient shards have the means: update and gather."""
    raise NotImplementedError


def zero3_linear(x: Tensor, shard: Tensor, out_features: int) -> Tensor:
    """Part 3. x @ weight.T, where the weight of shape (out_features, in_features) exists only as one shard per rank.

    The gradient of x is that of this rank's batch. The gradient of the shard is the mean over ranks.
    """
    raise NotImplementedError
