"""The Triton kernel of the gradient norm; `gradient_norm.py` launches it. Imported where Triton is installed only."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.core.kernels.adamw_kernel import tensor_at


@triton.jit
def square_sums_kernel(addresses, blocks, sizes, sums, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the squares of one block of elements of one tensor in float32."""
    program = tl.program_id(0).to(tl.int64)
    tensor, block = tl.load(blocks + 2 * program), tl.load(blocks + 2 * program + 1)
    source, size = tensor_at(addresses, tensor, DTYPE, ALIGNED), tl.load(sizes + tensor)
    begin = block.to(tl.int64) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    # Without a mask, a thread reads 16 bytes at once.
    if begin + BLOCK <= size:
        x = tl.load(source + at).to(tl.float32)
        tl.store(sums + program, tl.sum(x * x, 0))
    else:
        x = tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(sums + program, tl.sum(x * x, 0))
