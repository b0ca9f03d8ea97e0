"""Synchronized batch normalization on any device: statistics over the micro-batches of all data-parallel ranks.

torch's own `nn.SyncBatchNorm` runs on accelerators only. Its modules in a user's model keep their parameters, buffers
and names, and become modules of the class below.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from meshwright.core.torch_private import BatchNormBase


class GroupBatchNorm(BatchNormBase):
    """Normalizes with the mean and variance over the batches of all ranks of a group, whose sizes may differ. Without a
    group, statistics are those of the local batch. Statistics are float32 at least.
    """

    process_group: dist.ProcessGroup | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        dims = [0, *range(2, x.ndim)]
        local_count = x.numel() // x.shape[1]
        if local_count * (self.process_group.size() if self.process_group is not None else 1) == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        # Sums over ranks are float64, in which counts are exact.
        local = torch.full((1,), local_count, dtype=torch.float64, device=x.device)
        sums = self.sum_over_ranks(torch.cat((values.sum(dims).double(), local)))
        count = sums[-1].detach()
        shape = (1, -1, *(1 for _ in dims[1:]))
        mean = (sums[:-1] / count).to(values.dtype)
        centered = values - mean.view(shape)
        variance = (self.sum_over_ranks(centered.square().sum(dims).double()) / count).to(values.dtype)
        if self.track_running_stats:
            update_running_statistics(self, mean.detach(), variance.detach() * count / (count - 1))
        normalized = centered * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(x.dtype)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.process_group is None:
            return values
        summed: Tensor = all_reduce(values, group=self.process_group)
        return summed


def synchronize_batch_norm(model: nn.Module, make_group: Callable[[], dist.ProcessGroup | None] = lambda: None) -> None:
    """Changes every `nn.SyncBatchNorm` to a `GroupBatchNorm`. The group is made only if there is such a module."""
    modules = [module for module in model.modules() if isinstance(module, (nn.SyncBatchNorm, GroupBatchNorm))]
    group = make_group() if modules else None
    for module in modules:
        module.__class__ = GroupBatchNorm
        module.process_group = group


@torch.no_grad()
def update_running_statistics(module: GroupBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None
    assert module.running_var is not None
    module.num_batches_tracked.add_(1)
    momentum = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(variance.to(module.running_var.dtype), momentum)
