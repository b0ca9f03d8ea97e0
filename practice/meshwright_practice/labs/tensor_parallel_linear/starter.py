"""Lab: column-parallel and row-parallel linear layers. Replace every `raise NotImplementedError`, and save.

As in nn.Linear, a weight has the shape (out_features, in_features), and y = x @ weight.T + bias. The process group
exists already. Gradients come from autograd; write a torch.autograd.Function where a collective is part of it.
"""

import torch.distributed as dist  # noqa: F401
from torch import Tensor


def shard_column(weight: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's part of the output features, consecutive ones."""
    raise NotImplementedError


def shard_row(weight: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's part of the input features, consecutive ones."""
    raise NotImplementedError


def column_linear(x: Tensor, weight_shard: Tensor) -> Tensor:
    """x is the same on all ranks. Returns this rank's output features; the gradient of x is complete on every rank."""
    raise NotImplementedError


def row_linear(x_shard: Tensor, weight_shard: Tensor, bias: Tensor) -> Tensor:
    """x_shard has this rank's input features. Returns the full output, the same on all ranks."""
    raise NotImplementedError


def mlp(x: Tensor, up_shard: Tensor, down_shard: Tensor, bias: Tensor) -> Tensor:
    """A column-parallel layer, GELU, and a row-parallel layer."""
    raise NotImplementedError
