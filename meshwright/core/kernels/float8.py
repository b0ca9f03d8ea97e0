"""Matrix products in float8 (e4m3), with one scale per row of each operand.

A float8 matrix `Float8(values, scale)` stands for `values * scale`, with `scale` of shape (rows, 1): the largest
magnitude of a row becomes 448, the largest float8. A product reduces over the rows' elements of both operands, so
forward needs activations and weights by rows, and backward needs activations, weights and gradients by columns as well:
`columns` is the transposed matrix, cast by its own rows.

On CUDA, a Triton kernel writes both casts of a tile that it reads once, and the product is torch's scaled matmul.
Elsewhere the torch functions here compute the same cast, and the product of the cast values in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.core.kernels.triton_runtime import runs_triton
from meshwright.core.torch_private import scaled_mm

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST_AMAX = 2.0**-100
"""A row whose largest magnitude is smaller is scaled as if it were this, so that a row of zeros has a finite scale."""
MULTIPLE = 16
"""The dimensions of a float8 product are multiples of this."""


class Float8(NamedTuple):
    """A float8 matrix and the scale of every row."""

    values: Tensor
    scale: Tensor


def to_float8(x: Tensor) -> Float8:
    """Casts a matrix by rows. Compiled, it is one kernel together with the operators that make `x`."""
    amax = x.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST_AMAX)
    factor = torch.full_like(amax, LARGEST) / amax  # a number divided by a tensor would be rounded twice
    return Float8((x.float() * factor).to(FLOAT8), amax / LARGEST)


def to_float8_both(x: Tensor) -> tuple[Float8, Float8]:
    """Casts a matrix by rows, and its transpose by rows. The columns of the latter are padded with zeros to a multiple
    of 16.
    """
    values, scale, columns, column_scale = cast_both(x)
    return Float8(values, scale), Float8(columns, column_scale)


def pad(columns: Tensor) -> Tensor:
    return torch.nn.functional.pad(columns, (0, -columns.shape[1] % MULTIPLE))


@torch.library.custom_op("meshwright::float8_cast_both", mutates_args=())
def cast_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values and scale by rows, and by columns."""
    if not runs_triton(x.device):
        return (*to_float8(x), *to_float8(pad(x.t()).contiguous()))
    from meshwright.core.kernels.float8_kernel import cast

    x = x.contiguous()
    row_amax, column_amax = x.new_zeros(sum(x.shape), dtype=torch.float32).split(x.shape)
    by_rows, by_columns = empty_rows(x), empty_columns(x)
    cast(x, row_amax, column_amax, by_rows, by_columns, LARGEST, SMALLEST_AMAX)
    return (*by_rows, *by_columns)


@cast_both.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*empty_rows(x), *empty_columns(x))


def empty_rows(x: Tensor) -> Float8:
    return Float8(x.new_empty(x.shape, dtype=FLOAT8), x.new_empty(len(x), 1, dtype=torch.float32))


def empty_columns(x: Tensor) -> Float8:
    rows, columns = x.shape
    values = x.new_empty(columns, rows + -rows % MULTIPLE, dtype=FLOAT8)
    return Float8(values, x.new_empty(columns, 1, dtype=torch.float32))


def cast_columns(x: Tensor) -> Float8:
    """Casts the transpose of a matrix by rows."""
    if not runs_triton(x.device):
        return to_float8(pad(x.t()).contiguous())
    from meshwright.core.kernels.float8_kernel import cast

    x = x.contiguous()
    amax, by_columns = x.new_zeros(x.shape[1], dtype=torch.float32), empty_columns(x)
    cast(x, None, amax, (None, None), by_columns, LARGEST, SMALLEST_AMAX)
    return by_columns


def multiply(left: Float8, right: Float8, dtype: torch.dtype) -> Tensor:
    """`left @ right.t()`, which reduces over the rows of both."""
    if left.values.is_cuda:
        return scaled_mm(left.values, right.values.t(), left.scale, right.scale.t(), dtype, fast=True)
    with torch.autocast(left.values.device.type, enabled=False):
        product = left.values.float() @ right.values.float().t()
    return (product * left.scale * right.scale.t()).to(dtype)


@torch.library.custom_op("meshwright::float8_input_gradient", mutates_args=())
def input_gradient(values: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input of a linear layer, from that of its output. The weight is cast by columns here, inside
    an operator that needs the gradient: compiled, nothing of the weight is saved between forward and backward, and
    FSDP2 can free it.
    """
    return multiply(Float8(values, scale), cast_columns(weight), weight.dtype)


@input_gradient.register_fake
def _(values: Tensor, _scale: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(len(values), weight.shape[1])


@register_flop_formula(torch.ops.meshwright.float8_input_gradient)
def input_gradient_flops(
    values: torch.Size, _scale: torch.Size, weight: torch.Size, *_args: object, **_kwargs: object
) -> int:
    return 2 * values[0] * weight[0] * weight[1]


class Float8Product(torch.autograd.Function):
    """`x @ weight.t()` of two matrices of one dtype, forward and backward in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, columns = to_float8_both(x)
        ctx.save_for_backward(*columns, weight)
        return multiply(rows, to_float8(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        columns, scale, weight = ctx.saved_tensors
        rows, gradient_columns = to_float8_both(gradient)
        of_x = input_gradient(*rows, weight) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = multiply(gradient_columns, Float8(columns, scale), weight.dtype)
        return of_x, of_weight


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x, weight)` of (..., in) and (out, in), both of one dtype, in float8."""
    x_matrix = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        product: Tensor = Float8Product.apply(x_matrix, weight)  # type: ignore[no-untyped-call]
    else:
        product = multiply(to_float8(x_matrix), to_float8(weight), x.dtype)
    return product.view(*x.shape[:-1], len(weight))
