"""The Triton kernel of AdamW on master weights; `adamw.py` launches it. Imported where Triton is installed only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["index"])  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    master,
    weight,
    gradient,
    exp_avg,
    exp_avg_sq,
    corrections,
    scalars,
    index,
    count,
    lr,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    BLOCK: tl.constexpr,
):
    """Updates one block of elements, if the step is finite."""
    divisor, finite = tl.load(scalars), tl.load(scalars + 1)
    if finite == 0:
        return
    correction1, correction2_sqrt = tl.load(corrections + 2 * index), tl.load(corrections + 2 * index + 1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(master + at, mask=inside)
    slope = tl.load(gradient + at, mask=inside).to(tl.float32) / divisor
    mean = beta1 * tl.load(exp_avg + at, mask=inside) + rest1 * slope
    square = beta2 * tl.load(exp_avg_sq + at, mask=inside) + rest2 * slope * slope
    value = decay * value - lr / correction1 * mean / (tl.sqrt(square) / correction2_sqrt + eps)
    tl.store(exp_avg + at, mean, mask=inside)
    tl.store(exp_avg_sq + at, square, mask=inside)
    tl.store(master + at, value, mask=inside)
    tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)
