"""A checkpoint's tensors unsharded: one digest whatever layout wrote them, and how two differ. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.checkpoint.listing import CheckpointEntry
from meshwright.checkpoint.manifest import TensorRecord
from meshwright.config.dtypes import TENSOR_BYTES

NUMPY_DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2"}
NUMPY_DTYPES |= {"int8": "i1", "uint8": "u1", "bool": "u1"}


def read_full_tensor(entry: CheckpointEntry, name: str) -> NDArray[Any]:
    """A whole tensor, its elements as their bits."""
    assert entry.manifest is not None
    record = entry.manifest.tensors[name]
    element = np.dtype(f"<u{TENSOR_BYTES[record.dtype]}")
    whole = np.empty(record.shape, element)
    for piece in record.regions:
        content = entry.store.read(f"{entry.folder}/{piece.file}", piece.start, piece.length)
        block = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
        whole[block] = np.frombuffer(content, element).reshape(piece.shape)
    return whole


def tensor_digest_line(name: str, dtype: str, shape: Iterable[int], content: Any) -> str:
    """What the digest of a whole state is made of, a line a tensor."""
    return f"{name} {dtype} {list(shape)} {xxhash.xxh3_128_hexdigest(content)}"


def digest_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def state_digest(entry: CheckpointEntry) -> str:
    """One digest of every parameter, buffer and optimizer tensor by name."""
    assert entry.manifest is not None
    return digest_of_lines(
        tensor_digest_line(
            name, record.dtype, record.shape, np.ascontiguousarray(read_full_tensor(entry, name)).tobytes()
        )
        for name, record in entry.manifest.tensors.items()
    )


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of one checkpoint differs from that of another."""

    name: str
    what: str
    elements: int = 0
    largest: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        if not self.elements:
            return f"{self.name}: {self.what}"
        return f"{self.name}: {self.what}; largest {self.largest:.6g}, {self.relative:.3g} of the largest value"


def compare_checkpoints(one: CheckpointEntry, other: CheckpointEntry) -> Iterator[TensorDifference]:
    """The tensors in which two checkpoints differ, in order of name."""
    assert one.manifest is not None
    assert other.manifest is not None
    ours, theirs = one.manifest.tensors, other.manifest.tensors
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            yield TensorDifference(name, f"only in {one.name if name in ours else other.name}")
        elif (ours[name].dtype, ours[name].shape) != (theirs[name].dtype, theirs[name].shape):
            yield TensorDifference(name, f"{describe_tensor(ours[name])} and {describe_tensor(theirs[name])}")
        else:
            a, b = read_full_tensor(one, name), read_full_tensor(other, name)
            if unequal := int(np.count_nonzero(a != b)):
                yield compare_tensors(name, ours[name], a, b, unequal)


def compare_tensors(
    name: str, record: TensorRecord, a: NDArray[Any], b: NDArray[Any], unequal: int
) -> TensorDifference:
    with np.errstate(all="ignore"):
        gap = np.where(a == b, 0.0, absolute_differences(a, b, record.dtype))
    largest = float(np.max(gap, initial=0.0))  # not a number where one of the two is none
    scale = float(np.nanmax(np.abs(to_float64(a, record.dtype)), initial=0.0))
    what = f"{unequal:,} of {a.size:,} elements"
    return TensorDifference(name, what, unequal, largest, largest / scale if scale else float(largest > 0))


def absolute_differences(a: NDArray[Any], b: NDArray[Any], dtype: str) -> NDArray[Any]:
    """|a - b|; of int64 exactly, since float64 cannot hold them all."""
    gap: NDArray[Any] = np.abs(to_float64(a, dtype) - to_float64(b, dtype))
    if dtype == "int64":
        x, y = a.view("<i8"), b.view("<i8")
        gap = (np.maximum(x, y).view("<u8") - np.minimum(x, y).view("<u8")).astype("f8")
    return gap


def to_float64(whole: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Raw elements as float64; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (whole.view("<u2").astype("<u4") << 16).view("<f4").astype("f8")
    if dtype not in NUMPY_DTYPES:
        return whole.view("u1").astype("f8")  # 8-bit floats: by their bits
    return whole.view(NUMPY_DTYPES[dtype]).astype("f8")


def describe_tensor(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"
