"""Recipes of 8-bit matmuls: the memory traffic of their casts and the rate of their matmuls; torch-free.

| recipe | scales | casts relative to tensorwise | matmul rate relative to tensorwise |
|---|---|---|---|
| tensorwise | one per tensor | 1: a pass for the largest magnitude, and one that casts | 1 |
| rowwise | one per row of each operand | 2.7 | 1 |
| blockwise | one per 128 x 128 block, or 1 x 128 | 1.5 | 0.8 |

Rowwise: the operands of the weight gradient have their scales along the other dimension, so that each tensor is reduced
and cast a second time, transposed. The factor 2.7 is derived from one H200, not measured by itself: eight layers of
Llama-8B gain 80 ms from rowwise matmuls where the faster matmuls alone would gain about 123, which is 14 bytes per cast
element; 5.2 is the fitted traffic of other profiles. The sustained 8-bit rate of an H200 was measured with rowwise
matmuls, so that they have no further factor. Blockwise (DeepSeek-V3, arXiv:2412.19437) adds partial sums in float32
outside of the tensor cores; both of its factors are stated. No published run has confirmed any of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Float8Recipe:
    """Costs relative to a tensorwise recipe."""

    cast_traffic: float
    matmul_rate: float


FLOAT8_RECIPES = {
    "tensorwise": Float8Recipe(1.0, 1.0),
    "rowwise": Float8Recipe(2.7, 1.0),
    "blockwise": Float8Recipe(1.5, 0.8),
}
"""Name -> recipe."""
