"""Checks that shards are written and read at the right offsets in files of several GiB, which are sparse on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.format.manifest_parts import RecordedPart, ShardOrigin
from meshwright.base.checkpoint.format.regions import TensorRecord
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.store.interface import Buffer
from meshwright.base.store.posix import PosixCalls, PosixStore
from meshwright.core.checkpoint.dcp_planner import LocalShardLoadPlanner, LocalShardSavePlanner, as_planner_state
from meshwright.core.checkpoint.restore import local_regions
from meshwright.core.checkpoint.shards import ShardReader, ShardWriter
from meshwright.core.checkpoint.state import CheckpointState
from meshwright.core.checkpoint.verify import verify_file
from meshwright.errors import CheckpointError
from meshwright.prover.claims import Claim, proof_folder

HOLE_BYTES = 1 << 31
"""The size of each of two tensors of zeros: what follows them is beyond 2^31 and beyond 2^32."""
BOUNDARY_BLOCKS = BlockSizes(io_bytes=4096, digest_bytes=8192)


class SparseCalls(PosixCalls):
    """System calls that leave a hole in the file where a large block of zeros is written."""

    def write(self, file: int, content: Buffer, offset: int) -> int:
        if len(content) < BLOCK_SIZES.io_bytes or np.frombuffer(content, np.uint64).any():
            return super().write(file, content, offset)
        return len(content)


def check_large_files() -> Claim:
    """Writes and reads through the writer and the reader of checkpoints, with real file offsets beyond 2^32."""
    try:
        with proof_folder() as base:
            problems = [problem for problem in (check_offsets(base), *check_file_ends(base)) if problem]
    except CheckpointException as error:
        problems = [f"a sparse file of 4 GiB cannot be written: {error.failures[0][0]}"]
    except OSError as error:
        problems = [f"a sparse file of 4 GiB cannot be written or read: {error}"]
    return Claim(
        "shards are written and read at the right places in files of more than 2^31 and 2^32 bytes, and in files that "
        "end before, at and after the end of a block",
        not problems,
        problems[0] if problems else "3 tensors between holes in a sparse file of 4 GiB, 3 files around a block's end",
    )


def check_offsets(base: Path) -> str:
    hole = torch.from_numpy(np.zeros(HOLE_BYTES, np.uint8))  # pages that are only read take no memory
    small = {name: torch.arange(1000, dtype=torch.float64) + place for place, name in enumerate("abc")}
    tensors = {"a": small["a"], "hole 1": hole, "b": small["b"], "hole 2": hole, "c": small["c"]}
    entry = write(base, "large", tensors, BLOCK_SIZES)
    return read_back(entry, small) or find_undetected_flip(entry, small)


def check_file_ends(base: Path) -> list[str]:
    """Files that end one element before the end of a block, exactly there, and one element after it."""
    problems = []
    for extra in (-1, 0, 1):
        tensor = torch.arange(3 * BOUNDARY_BLOCKS.io_bytes // 4 + extra, dtype=torch.int32)
        entry = write(base, f"end{extra}", {"a": tensor}, BOUNDARY_BLOCKS)
        problems.append(read_back(entry, {"a": tensor}))
        assert entry.manifest is not None
        part = entry.read_part(next(iter(entry.manifest.parts)))
        file, record = part.file, part.record
        path, chunk, io_bytes = f"{entry.folder}/{file}", BOUNDARY_BLOCKS.digest_bytes, BOUNDARY_BLOCKS.io_bytes
        problems += map(str, verify_file(entry.store, path, record, chunk, lambda: None, io_bytes))
    return problems


def write(base: Path, folder: str, tensors: dict[str, Tensor], block_sizes: BlockSizes) -> CheckpointEntry:
    """Writes a checkpoint of one rank."""
    store = PosixStore(base, SparseCalls())
    published: list[tuple[dict[str, RecordedPart], dict[str, TensorRecord]]] = []
    publish = lambda parts, records: published.append((parts, records))  # noqa: E731
    writer = ShardWriter(store, folder, ShardOrigin("prove", 1, 1, 1, 0), ("data/0", {}), publish, block_sizes)
    state: CheckpointState = dict(tensors)
    dcp.save(as_planner_state(state), storage_writer=writer, planner=LocalShardSavePlanner(), no_dist=True)
    [(parts, records)] = published
    tables: dict[str, Any] = {
        name: {} for name in ("layout", "identity", "made_by", "data", "rng", "schedule", "scaler", "counters")
    }
    manifest = Manifest(
        run="prove",
        timeline=1,
        step=1,
        attempt=1,
        ordinal=0,
        parent="",
        tensors=records,
        parts=parts,
        chunk=block_sizes.digest_bytes,
        **tables,
    )
    return CheckpointEntry(store, folder, 1, 1, Manifest.decode(manifest.encode()))


def read_back(entry: CheckpointEntry, tensors: dict[str, Tensor]) -> str:
    """What is wrong with tensors as the reader of checkpoints, and as plain system calls, read them; or ''."""
    assert entry.manifest is not None
    for name, tensor in tensors.items():
        [region] = entry.index.regions(name)
        with open(Path(entry.store.path(entry.folder)) / region.file, "rb") as file:  # type: ignore[attr-defined]
            file.seek(region.start)
            if file.read(region.length) != tensor.numpy().tobytes():
                return f"{name} is not at offset {region.start:,} of its file"
    found: CheckpointState = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    try:
        load(entry, found)
    except CheckpointException as error:
        return f"an intact file of {entry.manifest.total_bytes:,} bytes is refused: {error.failures[0][0]}"
    wrong = [name for name, tensor in tensors.items() if not torch.equal(as_tensor(found[name]), tensor)]
    return f"{wrong[0]} is read from a wrong place of a file of {entry.manifest.total_bytes:,} bytes" if wrong else ""


def find_undetected_flip(entry: CheckpointEntry, tensors: dict[str, Tensor]) -> str:
    """Flips a bit beyond 2^32: the reader must refuse the chunk."""
    assert entry.manifest is not None
    [region] = entry.index.regions("c")
    with open(Path(entry.store.path(entry.folder)) / region.file, "r+b") as file:  # type: ignore[attr-defined]
        file.seek(region.start)
        value = file.read(1)[0]
        file.seek(region.start)
        file.write(bytes([value ^ 1]))
    try:
        load(entry, {"c": torch.zeros_like(tensors["c"])})
    except CheckpointException as error:
        return "" if isinstance(error.failures[0][0], CheckpointError) else str(error)
    return f"a flipped bit at offset {region.start:,} is loaded"


def load(entry: CheckpointEntry, state: CheckpointState) -> None:
    reader, planner = ShardReader(entry, local_regions(entry.index, state), lambda: None), LocalShardLoadPlanner()
    dcp.load(as_planner_state(state), storage_reader=reader, planner=planner, no_dist=True)


def as_tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
