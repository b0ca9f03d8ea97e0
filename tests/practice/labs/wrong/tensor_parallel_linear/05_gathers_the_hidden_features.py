"""Gathers the hidden features after GELU and takes its part again. Expected check: messages in forward."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshwright_practice.labs.tensor_parallel_linear.solution import column_linear, row_linear, shard_column, shard_row


class GatherAndSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, hidden.contiguous())
        return torch.cat(parts, dim=1).chunk(len(parts), dim=1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def mlp(x, up_shard, down_shard, bias):
    return row_linear(GatherAndSlice.apply(F.gelu(column_linear(x, up_shard))), down_shard, bias)
