"""Triton kernels that cast a matrix to float8 by rows and by columns, with two reads of it in all."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

AMAX_TILE: dict[str, Any] = {"ROWS": 64, "COLUMNS": 64, "TILES": 8, "num_warps": 2}
"""One program reads this many tiles, one below the other, before it writes the largest magnitudes of its columns."""
CAST_TILE: dict[str, Any] = {"ROWS": 64, "COLUMNS": 128}


@triton.jit  # type: ignore[untyped-decorator]
def amax_kernel(  # type: ignore[no-untyped-def]
    x, row_amax, column_amax, rows, columns, stride,
    BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of every row and of every column. A maximum does not depend on the order of programs."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None].to(tl.int64) * stride + column[None, :]
        magnitude = tl.abs(tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32))
        if BY_ROWS:
            tl.atomic_max(row_amax + row, tl.max(magnitude, 1), mask=row < rows, sem="relaxed")
        if BY_COLUMNS:
            largest = tl.maximum(largest, magnitude)
    if BY_COLUMNS:
        tl.atomic_max(column_amax + column, tl.max(largest, 0), mask=column < columns, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def cast_kernel(  # type: ignore[no-untyped-def]
    x, row_amax, column_amax, by_rows, row_scale, by_columns, column_scale, rows, columns, stride, padded_rows,
    BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Casts one tile, and writes it as it is, transposed, or both. The transposed matrix ends with columns of zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if BY_ROWS:
        amax = tl.maximum(tl.load(row_amax + row, mask=row < rows, other=1.0), SMALLEST)
        scaled = (value * tl.div_rn(LARGEST + tl.zeros_like(amax), amax)[:, None]).to(by_rows.dtype.element_ty)
        tl.store(by_rows + row[:, None].to(tl.int64) * columns + column[None, :], scaled, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(row_scale + row, tl.div_rn(amax, LARGEST + tl.zeros_like(amax)), mask=row < rows)
    if BY_COLUMNS:
        amax = tl.maximum(tl.load(column_amax + column, mask=column < columns, other=1.0), SMALLEST)
        scaled = (value * tl.div_rn(LARGEST + tl.zeros_like(amax), amax)[None, :]).to(by_columns.dtype.element_ty)
        offsets = column[:, None].to(tl.int64) * padded_rows + row[None, :]
        inside = (column < columns)[:, None] & (row < padded_rows)[None, :]
        tl.store(by_columns + offsets, tl.trans(scaled), mask=inside)
        if tl.program_id(0) == 0:
            tl.store(column_scale + column, tl.div_rn(amax, LARGEST + tl.zeros_like(amax)), mask=column < columns)


def cast(
    x: Tensor,
    row_amax: Tensor | None,
    column_amax: Tensor | None,
    by_rows: tuple[Tensor, Tensor] | tuple[None, None],
    by_columns: tuple[Tensor, Tensor] | tuple[None, None],
    largest: float,
    smallest: float,
) -> None:
    """Finds the largest magnitudes, which start as zeros, and writes values and scales; what is None is left out."""
    rows, columns = x.shape
    padded_rows = rows if by_columns[0] is None else by_columns[0].shape[1]
    flags: dict[str, Any] = {"BY_ROWS": by_rows[0] is not None, "BY_COLUMNS": by_columns[0] is not None}
    read = AMAX_TILE["ROWS"] * AMAX_TILE["TILES"]
    amax_kernel[(triton.cdiv(rows, read), triton.cdiv(columns, AMAX_TILE["COLUMNS"]))](
        x, row_amax, column_amax, rows, columns, x.stride(0), **flags, **AMAX_TILE
    )
    cast_kernel[(triton.cdiv(padded_rows, CAST_TILE["ROWS"]), triton.cdiv(columns, CAST_TILE["COLUMNS"]))](
        x, row_amax, column_amax, *by_rows, *by_columns, rows, columns, x.stride(0), padded_rows,
        **flags, **CAST_TILE, LARGEST=largest, SMALLEST=smallest,
    )  # fmt: skip
