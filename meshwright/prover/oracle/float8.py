"""Matrix products whose operands are rounded to float8 with one scale per row, in forward and in backward.

Every operand of a product is rounded along the dimension that the product sums over, and the rounded values are
multiplied in float32. So forward rounds inputs and weights along the features, the gradient of the input rounds
gradients and weights along the outputs, and the gradient of the weight rounds gradients and inputs along the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE = 16
"""A product is in float8 if both dimensions of its matrix are multiples of this."""


def round_along(x: Tensor, dim: int) -> Tensor:
    """The values nearest to x among multiples of float8 numbers, of which the largest is the largest along `dim`."""
    largest = x.float().abs().amax(dim, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / unit).to(torch.float8_e4m3fn).float() * unit


class RoundedProduct(torch.autograd.Function):
    """(tokens, in) times the transposed (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return (round_along(x, 1) @ round_along(matrix, 1).mT).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, matrix = ctx.saved_tensors
        of_x = round_along(gradient, 1) @ round_along(matrix, 0)
        of_matrix = round_along(gradient, 0).mT @ round_along(x, 0)
        return of_x.to(x.dtype), of_matrix.to(matrix.dtype)


def rounded_product(x: Tensor, matrix: Tensor) -> Tensor:
    """x times the transposed matrix, as far as its sizes allow in float8."""
    if any(size % MULTIPLE for size in matrix.shape):
        return F.linear(x, matrix)
    with torch.autocast("cpu", enabled=False):
        product: Tensor = RoundedProduct.apply(x.flatten(0, -2), matrix)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], len(matrix))


class RoundedLinear(nn.Linear):
    """A linear layer of a plain module in float8."""

    def forward(self, input: Tensor) -> Tensor:
        product = rounded_product(input.bfloat16(), self.weight.bfloat16())
        return product if self.bias is None else product + self.bias.to(product.dtype)


@contextmanager
def rounded_layers(layers: Iterable[nn.Linear]) -> Iterator[None]:
    """These layers compute in float8 inside."""
    changed = list(layers)
    for layer in changed:
        layer.__class__ = RoundedLinear
    try:
        yield
    finally:
        for layer in changed:
            layer.__class__ = nn.Linear
