"""Regions of tensors in files, and the proof that they cover every tensor exactly once. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.checkpoint.format.canonical import InvalidManifest
from meshwright.base.dtypes import TENSOR_BYTES

MAX_DIMENSIONS = 64
"""The largest number of dimensions of a tensor."""
MAX_INTEGER = 1 << 63
"""Sizes and offsets are below it: they are kept as 64-bit integers."""
FIXED_COLUMNS = 3
"""The columns of a region table before the offset and the shape: part, tensor, start."""
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TensorRecord:
    """The dtype and the full shape of a tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]

    def validate(self, name: str) -> None:
        """Raise InvalidManifest unless the dtype and the shape are possible."""
        if type(self.dtype) is not str or self.dtype not in TENSOR_BYTES:
            raise InvalidManifest(f"tensor {name}: unknown dtype {self.dtype!r}")
        if len(self.shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < MAX_INTEGER for n in self.shape):
            raise InvalidManifest(f"tensor {name}: invalid shape")


@dataclass(frozen=True)
class TensorRegion:
    """A rectangular region of a tensor, and the byte range of a file that stores it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int

    def validate(self, name: str, tensor: TensorRecord, file_size: int) -> None:
        """Raise InvalidManifest unless the region is inside of its tensor and inside of its file."""
        numbers = (*self.offset, *self.shape, self.start, self.length)
        dimensions = len(tensor.shape)
        if (
            len(self.offset) != dimensions
            or len(self.shape) != dimensions
            or not all(type(n) is int and n >= 0 for n in numbers)
        ):
            raise InvalidManifest(f"tensor {name}: invalid region {self.shape} at {self.offset} of {tensor.shape}")
        if any(o + s > t for o, s, t in zip(self.offset, self.shape, tensor.shape, strict=True)):
            raise InvalidManifest(f"tensor {name}: a region exceeds the shape {tensor.shape}")
        if self.length != prod(self.shape) * TENSOR_BYTES[tensor.dtype]:
            raise InvalidManifest(f"tensor {name}: a region {self.shape} of {tensor.dtype} has {self.length} bytes")
        if self.start + self.length > file_size:
            raise InvalidManifest(f"tensor {name}: a region is outside of file {self.file}")


class RegionTable:
    """The regions of many parts as integers: one array per number of dimensions, one row per region.

    A row is (part, tensor, start, offset..., shape...): it takes a tenth of the memory of objects, and one collective
    moves the rows of all ranks.
    """

    def __init__(self, blocks: dict[int, Integers]) -> None:
        self.blocks = {
            dimensions: rows[np.argsort(rows[:, 1], kind="stable")] for dimensions, rows in sorted(blocks.items())
        }
        """By number of dimensions, the rows in the order of the tensors."""

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> RegionTable:
        by_dimensions: dict[int, list[Sequence[int]]] = {}
        for row in rows:
            by_dimensions.setdefault((len(row) - FIXED_COLUMNS) // 2, []).append(row)
        return cls({dimensions: np.array(same, np.int64) for dimensions, same in by_dimensions.items()})

    @classmethod
    def merge(cls, tables: Sequence[RegionTable]) -> RegionTable:
        found = {dimensions for table in tables for dimensions in table.blocks}
        return cls({d: np.concatenate([table.blocks[d] for table in tables if d in table.blocks]) for d in found})

    def encode(self) -> Integers:
        """The table as one array: for each number of dimensions, that number, the number of rows, and the rows."""
        arrays = [np.empty(0, np.int64)]
        for dimensions, rows in self.blocks.items():
            arrays += [np.array([dimensions, len(rows)], np.int64), rows.reshape(-1)]
        return np.concatenate(arrays)

    @classmethod
    def decode(cls, encoded: Integers) -> RegionTable:
        blocks, at = {}, 0
        while at < len(encoded):
            dimensions, rows = int(encoded[at]), int(encoded[at + 1])
            end = at + 2 + rows * (FIXED_COLUMNS + 2 * dimensions)
            blocks[dimensions] = encoded[at + 2 : end].reshape(rows, -1)
            at = end
        return cls(blocks)

    def rows(self, tensor: int, dimensions: int) -> Integers:
        """The rows of a tensor."""
        block = self.blocks.get(dimensions)
        if block is None:
            return np.empty((0, FIXED_COLUMNS + 2 * dimensions), np.int64)
        first, end = np.searchsorted(block[:, 1], (tensor, tensor + 1))
        return block[first:end]

    def validate(self, tensors: Mapping[str, TensorRecord], share: slice = slice(None)) -> None:
        """Raise InvalidManifest unless every tensor, or every tensor of a share of them, is covered exactly once."""
        for number, (name, record) in list(enumerate(tensors.items()))[share]:
            validate_coverage(name, record.shape, *split_rows(self.rows(number, len(record.shape))))


def split_rows(rows: Integers) -> tuple[Integers, Integers]:
    """The offsets and the shapes of rows."""
    dimensions = (rows.shape[1] - FIXED_COLUMNS) // 2
    return rows[:, FIXED_COLUMNS : FIXED_COLUMNS + dimensions], rows[:, FIXED_COLUMNS + dimensions :]


def as_columns(values: Sequence[Sequence[int]], dimensions: int) -> Integers:
    """Offsets or shapes as an array of one row each, also for a tensor without dimensions."""
    return np.array(values, np.int64).reshape(len(values), dimensions)


def validate_coverage(name: str, shape: tuple[int, ...], offsets: Integers, shapes: Integers) -> None:
    """Raise InvalidManifest unless the regions cover the tensor exactly once. Each is inside of the tensor, and has
    fewer than 2^63 elements.
    """
    elements = np.prod(shapes, axis=1, dtype=np.int64)
    # The sum of a hostile table exceeds 64 bits; the sums of its halves do not.
    covered = (int(np.sum(elements >> 32)) << 32) + int(np.sum(elements & 0xFFFFFFFF))
    if covered != prod(shape) or regions_overlap(shape, offsets, shapes):
        raise InvalidManifest(
            f"tensor {name}: its regions have {covered} of {prod(shape)} elements, or some of them twice"
        )


def regions_overlap(shape: tuple[int, ...], offsets: Integers, shapes: Integers) -> bool:
    """Whether two regions of a tensor share an element."""
    if not shape:
        return len(offsets) > 1
    filled = np.all(shapes > 0, axis=1)
    offsets, shapes = offsets[filled], shapes[filled]
    divided = [dim for dim, size in enumerate(shape) if np.any(shapes[:, dim] != size)]
    if len(divided) > 1:
        return boxes_overlap(offsets.tolist(), shapes.tolist())
    if not divided:
        return len(offsets) > 1
    # Sharded along one dimension, as FSDP and tensor parallelism do: the ends and the starts of intervals suffice.
    starts, ends = offsets[:, divided[0]], offsets[:, divided[0]] + shapes[:, divided[0]]
    order = np.argsort(starts)
    return bool(np.any(ends[order][:-1] > starts[order][1:]))


def boxes_overlap(offsets: list[list[int]], shapes: list[list[int]]) -> bool:
    """Whether two boxes share an element. A sweep along the dimension with the most shards keeps this fast."""
    boxes = list(zip(offsets, shapes, strict=True))
    dim = max(range(len(offsets[0])), key=lambda d: len({offset[d] for offset in offsets})) if offsets else 0
    active: list[tuple[list[int], list[int]]] = []
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        active = [other for other in active if other[0][dim] + other[1][dim] > box[0][dim]]
        for other in active:
            if all(o < p + q and p < o + s for o, s, p, q in zip(*box, *other, strict=True)):
                return True
        active.append(box)
    return False


def checksum(boxes: Iterable[tuple[str, Sequence[Sequence[int]], Sequence[Sequence[int]]]]) -> int:
    """A sum, modulo 2^64, of the hashes of every (tensor, offset, shape). It does not depend on the order, so that the
    checksums of ranks add up to that of the plan. `boxes` are (tensor, offsets, shapes).
    """
    total = 0
    for name, offsets, shapes in boxes:
        hashes = np.full(len(offsets), xxhash.xxh3_64_intdigest(name.encode()), np.uint64)
        for column in (*zip(*offsets, strict=True), *zip(*shapes, strict=True)):
            hashes = (hashes ^ np.array(column, np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(29)
        total += int(np.sum(hashes, dtype=np.uint64))
    return total % (1 << 64)


def find_intersecting(rows: Integers, offset: Sequence[int], shape: Sequence[int]) -> Any:
    """A mask of the rows whose regions share an element with a box."""
    offsets, shapes = split_rows(rows)
    begin, size = np.array(offset, np.int64), np.array(shape, np.int64)
    return np.all((offsets < begin + size) & (begin < offsets + shapes), axis=1)
