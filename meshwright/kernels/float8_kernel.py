"""Triton kernels that cast a matrix to float8 by rows and by columns, with two reads of it in all."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128
TILES_PER_PROGRAM = 4
"""The tiles, one below the other, of which a program finds the largest elements before it writes to memory."""


@triton.jit  # type: ignore[untyped-decorator]
def largest_kernel(  # type: ignore[no-untyped-def]
    x, row_amax, column_amax, rows, columns, stride,
    BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of every row and of every column. The maximum does not depend on the order of programs."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_max = tl.zeros([COLUMNS], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None].to(tl.int64) * stride + column[None, :]
        magnitude = tl.abs(tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32))
        if BY_ROWS:
            tl.atomic_max(row_amax + row, tl.max(magnitude, 1), mask=row < rows, sem="relaxed")
        if BY_COLUMNS:
            column_max = tl.maximum(column_max, tl.max(magnitude, 0))
    if BY_COLUMNS:
        tl.atomic_max(column_amax + column, column_max, mask=column < columns, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def cast_kernel(  # type: ignore[no-untyped-def]
    x, row_amax, column_amax, by_rows, by_columns, rows, columns, stride, padded_rows,
    BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Casts one tile, and writes it as it is, transposed, or both. The transposed matrix ends with rows of zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if BY_ROWS:
        factor = LARGEST / tl.maximum(tl.load(row_amax + row, mask=row < rows, other=1.0), SMALLEST)
        scaled = (value * factor[:, None]).to(by_rows.dtype.element_ty)
        tl.store(by_rows + row[:, None].to(tl.int64) * columns + column[None, :], scaled, mask=inside)
    if BY_COLUMNS:
        factor = LARGEST / tl.maximum(tl.load(column_amax + column, mask=column < columns, other=1.0), SMALLEST)
        scaled = tl.trans((value * factor[None, :]).to(by_columns.dtype.element_ty))
        offsets = column[:, None].to(tl.int64) * padded_rows + row[None, :]
        tl.store(by_columns + offsets, scaled, mask=(column < columns)[:, None] & (row < padded_rows)[None, :])


def cast(
    x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, by_rows: Tensor | None, by_columns: Tensor | None,
    largest: float, smallest: float,
) -> None:  # fmt: skip
    """Finds the largest magnitudes, which start as zeros, and casts; what is None is left out."""
    rows, columns = x.shape
    padded_rows = rows if by_columns is None else by_columns.shape[1]
    flags: dict[str, Any] = {"BY_ROWS": by_rows is not None, "BY_COLUMNS": by_columns is not None}
    tiles: dict[str, Any] = {"ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS}
    across = triton.cdiv(columns, TILE_COLUMNS)
    largest_kernel[(triton.cdiv(rows, TILE_ROWS * TILES_PER_PROGRAM), across)](
        x, row_amax, column_amax, rows, columns, x.stride(0), **flags, **tiles, TILES=TILES_PER_PROGRAM
    )
    cast_kernel[(triton.cdiv(padded_rows, TILE_ROWS), across)](
        x, row_amax, column_amax, by_rows, by_columns, rows, columns, x.stride(0), padded_rows,
        **flags, **tiles, LARGEST=largest, SMALLEST=smallest,
    )  # fmt: skip
