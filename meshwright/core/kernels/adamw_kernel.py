"""The Triton kernel of AdamW on master weights; `adamw.py` launches it. Imported where Triton is installed only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit  # type: ignore[untyped-decorator]
def tensor_at(addresses, index, dtype: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pointer to a tensor whose address is stored on the device."""
    pointer = tl.load(addresses + index).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit  # type: ignore[untyped-decorator]
def adamw_block(  # type: ignore[no-untyped-def]
    gradient,
    master,
    weight,
    exp_avg,
    exp_avg_sq,
    at,
    inside,
    divisor,
    rate,
    decay,
    correction1,
    correction2_sqrt,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
):
    """Updates the elements `at`, of those that are `inside`; None: all of them."""
    value = tl.load(master + at, mask=inside)
    slope = tl.load(gradient + at, mask=inside).to(tl.float32) / divisor
    mean = beta1 * tl.load(exp_avg + at, mask=inside) + rest1 * slope
    square = beta2 * tl.load(exp_avg_sq + at, mask=inside) + rest2 * slope * slope
    value = decay * value - rate / correction1 * mean / (tl.sqrt(square) / correction2_sqrt + eps)
    tl.store(exp_avg + at, mean, mask=inside)
    tl.store(exp_avg_sq + at, square, mask=inside)
    tl.store(master + at, value, mask=inside)
    tl.store(weight + at, value.to(WEIGHT), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    addresses,
    gradients,
    blocks,
    sizes,
    factors,
    corrections,
    scalars,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates one block of elements of one parameter, if the step is finite and the parameter has a gradient."""
    program = tl.program_id(0).to(tl.int64)
    parameter, block = tl.load(blocks + 2 * program), tl.load(blocks + 2 * program + 1)
    divisor, finite = tl.load(scalars), tl.load(scalars + 1)
    if (tl.load(gradients + parameter) == 0) | (finite == 0):
        return
    gradient = tensor_at(gradients, parameter, GRADIENT, ALIGNED)
    master = tensor_at(addresses, 4 * parameter, tl.float32, ALIGNED)
    weight = tensor_at(addresses, 4 * parameter + 1, WEIGHT, ALIGNED)
    exp_avg = tensor_at(addresses, 4 * parameter + 2, tl.float32, ALIGNED)
    exp_avg_sq = tensor_at(addresses, 4 * parameter + 3, tl.float32, ALIGNED)
    rate = lr * tl.load(factors + 2 * parameter)
    decay = 1.0 - rate * tl.load(factors + 2 * parameter + 1)
    correction1, correction2_sqrt = tl.load(corrections + 2 * parameter), tl.load(corrections + 2 * parameter + 1)
    begin = block.to(tl.int64) * BLOCK
    at, size = begin + tl.arange(0, BLOCK), tl.load(sizes + parameter)
    # Without a mask, a thread reads and writes 16 bytes at once.
    if begin + BLOCK <= size:
        adamw_block(
            gradient, master, weight, exp_avg, exp_avg_sq, at, None, divisor, rate, decay, correction1,
            correction2_sqrt, beta1, beta2, rest1, rest2, eps, WEIGHT,
        )  # fmt: skip
    else:
        adamw_block(
            gradient, master, weight, exp_avg, exp_avg_sq, at, at < size, divisor, rate, decay, correction1,
            correction2_sqrt, beta1, beta2, rest1, rest2, eps, WEIGHT,
        )  # fmt: skip
