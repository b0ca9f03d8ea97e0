"""Applies GELU to the output instead of the hidden features. Expected check: mlp output."""
# ruff: noqa: F401

import torch.nn.functional as F
from meshwright_practice.labs.tensor_parallel_linear.solution import column_linear, row_linear, shard_column, shard_row


def mlp(x, up_shard, down_shard, bias):
    return F.gelu(row_linear(column_linear(x, up_shard), down_shard, bias))
