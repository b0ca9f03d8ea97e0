"""ZeRO-3 averages the gradient of x, which belongs to one rank's batch. Expected check: ZeRO-3: gradients."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
from meshwright_practice.labs.zero_stages.solution import GatheredLinear, zero1_step, zero2_attach, zero2_step


class AveragedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, out_features):
        return GatheredLinear.forward(ctx, x, shard, out_features)

    @staticmethod
    def backward(ctx, grad_y):
        grad_x, grad_shard, _ = GatheredLinear.backward(ctx, grad_y)
        dist.all_reduce(grad_x)
        return grad_x / dist.get_world_size(), grad_shard, None


def zero3_linear(x, shard, out_features):
    return AveragedLinear.apply(x, shard, out_features)
