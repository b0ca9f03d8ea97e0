"""Several linear layers of the same input, on CUDA as one matrix product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def project(x: Tensor, layers: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
    """Applies every layer to `x`. On CUDA, plain linear layers become one product with their concatenated weights: it
    fills the device better than small products do, and backward computes the gradient of `x` without adding up parts.
    Copying the weights costs little beside that. Layers that parallelism, float8 or low-rank factors have changed, or
    that have hooks, are called one by one.
    """
    if not x.is_cuda or not all(map(is_plain_linear, layers)):
        return tuple(layer(x) for layer in layers)
    linears: list[Any] = list(layers)
    biases = [layer.bias for layer in linears if layer.bias is not None]
    if biases and len(biases) < len(linears):
        return tuple(layer(x) for layer in layers)
    product = F.linear(x, torch.cat([layer.weight for layer in linears]), torch.cat(biases) if biases else None)
    return product.split([layer.weight.shape[0] for layer in linears], dim=-1)  # type: ignore[no-any-return]


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether calling a layer does nothing but `F.linear` on plain tensors."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not isinstance(layer.weight, DTensor)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
    )
