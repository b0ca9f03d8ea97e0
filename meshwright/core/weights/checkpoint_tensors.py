"""Reads regions of the full tensors of a checkpoint, whatever layout stored them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.base.checkpoint.format.regions import TensorRegion
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.dtypes import TENSOR_BYTES

Bits = NDArray[Any]
"""Elements as unsigned integers of their bits: numpy has no bfloat16."""


class TensorSource(Protocol):
    """The tensors of a model, by the names of the model."""

    @property
    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The name of the torch dtype."""
        ...

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Bits:
        """A region of a tensor."""
        ...


class CheckpointTensors:
    """The parameters and buffers of a checkpoint. `prefix` is that of the names of a custom model beside its loss."""

    def __init__(self, entry: CheckpointEntry, prefix: str = "") -> None:
        assert entry.manifest is not None
        self.entry = entry
        self.stored = {
            name.partition("/")[2].removeprefix(prefix): name
            for name in entry.manifest.tensors
            if name.startswith((f"model/{prefix}", f"buffer/{prefix}"))
        }
        """The name of every tensor in the checkpoint."""
        self.records = {name: entry.manifest.tensors[stored] for name, stored in self.stored.items()}

    @property
    def names(self) -> list[str]:
        return list(self.records)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.records[name].shape

    def dtype(self, name: str) -> str:
        return self.records[name].dtype

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Bits:
        record = self.records[name]
        element = np.dtype(f"<u{TENSOR_BYTES[record.dtype]}")
        wanted = None
        for region in self.entry.index.intersecting(self.stored[name], offset, shape):
            starts = [max(a, b) for a, b in zip(offset, region.offset, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, region.offset, region.shape, strict=True)]
            where = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, offset, strict=True))
            inside = [(s - o, e - o) for s, e, o in zip(starts, ends, region.offset, strict=True)]
            part = self._read_region(region, inside, element)
            if part.shape == tuple(shape):
                return part
            wanted = np.empty(shape, element) if wanted is None else wanted
            wanted[where] = part
        return np.empty(shape, element) if wanted is None else wanted

    def _read_region(self, region: TensorRegion, inside: list[tuple[int, int]], element: np.dtype[Any]) -> Bits:
        """A part of a region. Its bytes are read by one call, from the first to the last row that it needs."""
        start, depth = region.start, 0
        while depth < len(inside) - 1 and inside[depth][1] - inside[depth][0] == 1:
            start += inside[depth][0] * prod(region.shape[depth + 1 :]) * element.itemsize
            depth += 1
        if not inside:
            return self._load(region.file, start, element, ())
        rows, rest = inside[depth], region.shape[depth + 1 :]
        row_bytes = prod(rest) * element.itemsize
        block = self._load(region.file, start + rows[0] * row_bytes, element, (rows[1] - rows[0], *rest))
        part = block[(slice(None), *(slice(*bounds) for bounds in inside[depth + 1 :]))]
        return part.reshape([end - begin for begin, end in inside])

    def _load(self, file: str, start: int, element: np.dtype[Any], shape: tuple[int, ...]) -> Bits:
        length = prod(shape) * element.itemsize
        return np.frombuffer(self.entry.store.read(f"{self.entry.folder}/{file}", start, length), element).reshape(
            shape
        )
