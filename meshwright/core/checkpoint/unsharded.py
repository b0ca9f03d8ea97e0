"""Reads the tensors of a checkpoint unsharded: one digest for every layout, and a comparison of two. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.checkpoint.format.regions import TensorRecord
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.dtypes import TENSOR_BYTES

NUMPY_DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2"}
NUMPY_DTYPES |= {"int8": "i1", "uint8": "u1", "bool": "u1"}


def read_full_tensor(entry: CheckpointEntry, name: str) -> NDArray[Any]:
    """A complete tensor, with every element as an unsigned integer of its bits."""
    assert entry.manifest is not None
    record = entry.manifest.tensors[name]
    element = np.dtype(f"<u{TENSOR_BYTES[record.dtype]}")
    tensor = np.empty(record.shape, element)
    for region in entry.index.regions(name):
        content = entry.store.read(f"{entry.folder}/{region.file}", region.start, region.length)
        where = tuple(slice(o, o + s) for o, s in zip(region.offset, region.shape, strict=True))
        tensor[where] = np.frombuffer(content, element).reshape(region.shape)
    return tensor


def tensor_digest_line(name: str, dtype: str, shape: Iterable[int], content: Any) -> str:
    """The line of one tensor in the text that the digest of a state covers."""
    return tensor_line(name, dtype, shape, xxhash.xxh3_128_hexdigest(content))


def tensor_line(name: str, dtype: str, shape: Iterable[int], digest: str) -> str:
    return f"{name} {dtype} {list(shape)} {digest}"


def digest_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def state_digest(entry: CheckpointEntry) -> str:
    """One digest of every parameter, buffer and optimizer tensor by name, the same for every layout."""
    assert entry.manifest is not None
    return digest_of_lines(
        tensor_digest_line(
            name, record.dtype, record.shape, np.ascontiguousarray(read_full_tensor(entry, name)).tobytes()
        )
        for name, record in entry.manifest.tensors.items()
    )


@dataclass(frozen=True)
class TensorDifference:
    """The difference between a tensor of one checkpoint and the tensor of the same name of another."""

    name: str
    what: str
    """The kind of difference, in words."""
    elements: int = 0
    """The number of elements that differ."""
    largest: float = 0.0
    """The largest absolute difference."""
    relative: float = 0.0
    """The largest absolute difference relative to the largest absolute value."""

    def __str__(self) -> str:
        if not self.elements:
            return f"{self.name}: {self.what}"
        return (
            f"{self.name}: {self.what}; largest difference {self.largest:.6g}, {self.relative:.3g} of the largest value"
        )


def compare_checkpoints(one: CheckpointEntry, other: CheckpointEntry) -> Iterator[TensorDifference]:
    """The tensors in which two checkpoints differ: parameters, buffers, then optimizer state, each in model order."""
    assert one.manifest is not None
    assert other.manifest is not None
    first, second = one.manifest.tensors, other.manifest.tensors
    bases = [manifest.base.get("digest", "none") for manifest in (one.manifest, other.manifest)]
    if bases[0] != bases[1]:
        yield TensorDifference("base", f"frozen parameters with digest {bases[0]} and {bases[1]}")
    for name in sorted(first.keys() | second.keys(), key=model_order):
        if name not in first or name not in second:
            yield TensorDifference(name, f"only in {one.name if name in first else other.name}")
        elif (first[name].dtype, first[name].shape) != (second[name].dtype, second[name].shape):
            yield TensorDifference(name, f"{describe_tensor(first[name])} and {describe_tensor(second[name])}")
        else:
            a, b = read_full_tensor(one, name), read_full_tensor(other, name)
            if unequal := int(np.count_nonzero(a != b)):
                yield compare_tensors(name, first[name], a, b, unequal)


def model_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """A sort key: parameters first, then buffers, then optimizer state; block 10 follows block 9, and the embedding
    precedes the blocks.
    """
    kind, _, path = name.partition("/")
    kinds = ("model", "buffer", "optimizer")
    parts = ("" if part == "embedding" else part for part in path.split("."))
    return kinds.index(kind) if kind in kinds else len(kinds), [
        (int(part), "") if part.isdigit() else (-1, part) for part in parts
    ]


def compare_tensors(
    name: str, record: TensorRecord, a: NDArray[Any], b: NDArray[Any], unequal: int
) -> TensorDifference:
    with np.errstate(all="ignore"):
        difference = np.where(a == b, 0.0, absolute_differences(a, b, record.dtype))
    largest = float(np.max(difference, initial=0.0))  # NaN if one of two elements is NaN
    scale = float(np.nanmax(np.abs(to_float64(a, record.dtype)), initial=0.0))
    what = f"{unequal:,} of {a.size:,} elements"
    return TensorDifference(name, what, unequal, largest, largest / scale if scale else float(largest > 0))


def absolute_differences(a: NDArray[Any], b: NDArray[Any], dtype: str) -> NDArray[Any]:
    """|a - b|. For int64 it is computed in integers, because float64 does not represent all of them."""
    difference: NDArray[Any] = np.abs(to_float64(a, dtype) - to_float64(b, dtype))
    if dtype == "int64":
        x, y = a.view("<i8"), b.view("<i8")
        difference = (np.maximum(x, y).view("<u8") - np.minimum(x, y).view("<u8")).astype("f8")
    return difference


def to_float64(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values of raw elements as float64; a bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (bits.view("<u2").astype("<u4") << 16).view("<f4").astype("f8")
    if dtype not in NUMPY_DTYPES:
        return bits.view("u1").astype("f8")  # 8-bit floats are compared by their bits
    return bits.view(NUMPY_DTYPES[dtype]).astype("f8")


def describe_tensor(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"
