"""Reads the parts of a checkpoint, and finds the regions of its tensors in them. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

from meshwright.base.checkpoint.format.canonical import InvalidManifest
from meshwright.base.checkpoint.format.manifest_parts import InvalidPart, ManifestPart, ShardOrigin
from meshwright.base.checkpoint.format.regions import (
    FIXED_COLUMNS,
    Integers,
    RegionTable,
    TensorRegion,
    find_intersecting,
    split_rows,
)
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.dtypes import TENSOR_BYTES
from meshwright.base.store.interface import Store

READ_THREADS = min(16, 4 * (os.cpu_count() or 1))
"""Threads that read parts: on network storage a read is mostly waiting."""
PARTS_AT_ONCE = 256
"""How many parts are in memory as objects at the same time; their rows are ten times smaller."""


class CheckpointIndex:
    """Where the tensors of a checkpoint are stored."""

    def __init__(self, manifest: Manifest, table: RegionTable) -> None:
        self.manifest, self.table = manifest, table
        self.files = [part.file for part in manifest.parts.values()]

    def regions(self, name: str) -> tuple[TensorRegion, ...]:
        """Every region of a tensor."""
        return self._as_regions(name, self._rows(name))

    def intersecting(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> tuple[TensorRegion, ...]:
        """The regions of a tensor that share an element with a box."""
        rows = self._rows(name)
        return self._as_regions(name, rows[find_intersecting(rows, offset, shape)])

    def _rows(self, name: str) -> Integers:
        return self.table.rows(self.manifest.tensor_numbers[name], len(self.manifest.tensors[name].shape))

    def _as_regions(self, name: str, rows: Integers) -> tuple[TensorRegion, ...]:
        size = TENSOR_BYTES[self.manifest.tensors[name].dtype]
        offsets, shapes = (values.tolist() for values in split_rows(rows))
        return tuple(
            TensorRegion(tuple(offset), tuple(shape), self.files[part], start, prod(shape) * size)
            for (part, _, start), offset, shape in zip(rows[:, :FIXED_COLUMNS].tolist(), offsets, shapes, strict=True)
        )


def read_part(store: Store, folder: str, manifest: Manifest, name: str) -> ManifestPart:
    """A part of a checkpoint. Raises OSError if it cannot be read, and InvalidPart unless it is valid and the part that
    the manifest records, byte for byte.
    """
    if name in manifest.embedded:
        return manifest.embedded[name]
    record = manifest.parts[name]
    raw = store.read(f"{folder}/{name}", 0, record.size + 1)
    if len(raw) != record.size:
        raise InvalidPart(name, f"{record.size:,} bytes", f"{store.size(f'{folder}/{name}') or 0:,} bytes")
    expected = f"digest {record.digest[:64]}"
    try:
        part, digest = ManifestPart.decode(raw)
    except InvalidManifest as problem:
        raise InvalidPart(name, expected, str(problem)) from None
    origin = ShardOrigin(manifest.run, manifest.timeline, manifest.step, manifest.attempt, record.rank)
    if digest != record.digest:
        note = f" (it is the part of {str(part.origin)[:200]})" if part.origin != origin else ""
        raise InvalidPart(name, expected, f"digest {digest}{note}")
    if part.origin != origin:
        raise InvalidPart(name, f"the part of {origin}", f"that of {str(part.origin)[:200]}")
    if (part.file, part.record.size, part.owner) != (record.file, record.shard_bytes, record.owner):
        raise InvalidPart(name, f"{record.file} of {record.shard_bytes:,} bytes", "a part with another shard or owner")
    try:
        part.validate(manifest.tensors, manifest.chunk)
    except InvalidManifest as problem:
        raise InvalidPart(name, "a valid part", str(problem)) from None
    return part


def read_parts(
    store: Store, folder: str, manifest: Manifest, names: Sequence[str]
) -> Iterator[tuple[str, ManifestPart | Exception]]:
    """Some parts of a checkpoint in order, each with its name, or the error of a part that cannot be read. Threads read
    the next ones meanwhile.
    """

    def read(name: str) -> ManifestPart | Exception:
        try:
            return read_part(store, folder, manifest, name)
        except (InvalidManifest, OSError) as problem:
            return problem

    if len(names) < READ_THREADS:  # threads take longer to start than a few small files to read
        yield from zip(names, map(read, names), strict=True)
        return
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="parts") as threads:
        for at in range(0, len(names), PARTS_AT_ONCE):
            several = names[at : at + PARTS_AT_ONCE]
            yield from zip(several, threads.map(read, several), strict=True)


def require_parts(
    store: Store, folder: str, manifest: Manifest, names: Sequence[str]
) -> Iterator[tuple[str, ManifestPart]]:
    """Some parts of a checkpoint. Raises the error of the first one that cannot be read."""
    for name, part in read_parts(store, folder, manifest, names):
        if isinstance(part, Exception):
            raise part
        yield name, part


def read_index(store: Store, folder: str, manifest: Manifest) -> CheckpointIndex:
    """The index of a complete checkpoint. Raises InvalidManifest unless every tensor is covered exactly once."""
    parts = require_parts(store, folder, manifest, list(manifest.parts))
    table = RegionTable.merge([manifest.index_regions(name, part) for name, part in parts])
    table.validate(manifest.tensors)
    return CheckpointIndex(manifest, table)
