"""Gathers the full weight and uses its own part, as sharded data parallelism does. Expected check: saved tensors."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshwright_practice.labs.tensor_parallel_linear.solution import SumGradient, row_linear, shard_column, shard_row


def column_linear(x, weight_shard):
    parts = [torch.empty_like(weight_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight_shard.detach())
    parts[dist.get_rank()] = weight_shard
    hidden = F.linear(SumGradient.apply(x), torch.cat(parts))
    return hidden.chunk(len(parts), dim=1)[dist.get_rank()]


def mlp(x, up_shard, down_shard, bias):
    return row_linear(F.gelu(column_linear(x, up_shard)), down_shard, bias)
