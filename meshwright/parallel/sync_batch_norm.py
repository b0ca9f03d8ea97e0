"""Synchronized batch normalization on any device: statistics over the micro-batches of all data-parallel ranks.

torch's own `nn.SyncBatchNorm` runs on accelerators only. Its modules in a user's model keep their parameters, buffers
and names; only their forward is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


def synchronize_batch_norm(model: nn.Module, make_group: Callable[[], dist.ProcessGroup | None] = lambda: None) -> None:
    """Replaces the forward of every `nn.SyncBatchNorm`. The group is made only if there is one; without a group,
    statistics are those of the local batch.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    group = make_group() if modules else None
    for module in modules:
        module.forward = partial(forward, module, group)  # type: ignore[method-assign]


def forward(module: nn.SyncBatchNorm, group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """Normalizes with the mean and variance over the batches of all ranks, whose sizes may differ."""
    if not module.training and module.running_mean is not None:
        return F.batch_norm(x, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps)
    dims = [0, *range(2, x.ndim)]
    count = x.new_tensor(x.numel() // x.shape[1]).reshape(1)
    sums = torch.cat((x.sum(dims), count))
    if group is not None:
        sums = all_reduce(sums, group=group)
    total, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
    shape = (1, -1, *(1 for _ in dims[1:]))
    centered = x - mean.view(shape)
    squares = centered.square().sum(dims)
    if group is not None:
        squares = all_reduce(squares, group=group)
    variance = squares / total
    if module.track_running_stats:
        update_running_statistics(module, mean.detach(), variance.detach() * total / (total - 1))
    normalized = centered * (variance + module.eps).rsqrt().view(shape)
    if module.weight is None:
        return normalized
    return normalized * module.weight.view(shape) + module.bias.view(shape)


@torch.no_grad()
def update_running_statistics(module: nn.SyncBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None
    assert module.running_var is not None
    module.num_batches_tracked.add_(1)
    momentum = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(variance.to(module.running_var.dtype), momentum)
