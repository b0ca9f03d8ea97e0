"""The size of a checkpoint's manifest, and the seconds to publish, list and open it, at thousands of ranks.

The records of the ranks are made without ranks: every tensor is sharded over all of them, as FSDP does, or each is
stored by one of them, as of replicas. Format 1 has everything in one file; format 2 has a part per rank. Both are
measured in one run on the same records, in a process of its own each, so that the peak memory is that of one format.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.checkpoint.format.canonical import canonical_digest, recorded_digest, serialize
from meshwright.base.checkpoint.format.index import CheckpointIndex
from meshwright.base.checkpoint.format.manifest_parts import (
    FileRecord,
    ManifestPart,
    RecordedPart,
    ShardOrigin,
    part_file,
    shard_file,
)
from meshwright.base.checkpoint.format.regions import (
    Integers,
    RegionTable,
    TensorRecord,
    TensorRegion,
    as_columns,
    checksum,
    validate_coverage,
)
from meshwright.base.checkpoint.listing import CheckpointEntry, checkpoint_folder, list_published
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, Manifest
from meshwright.base.store.posix import PosixStore

RANKS = (1024, 4096)
TENSORS = 300
ROWS, COLUMNS = 8, 4096
"""Rows of every tensor per rank, and columns: 300 tensors of float32 are 39 MB per rank."""
CHUNKS = 5
MAX_ROOT_BYTES = 1 << 20
"""The largest manifest at 4,096 ranks and 300 tensors."""
NAMES = [f"optimizer/decoder.blocks.{n // 10}.attention.projection.weight/{n % 10}" for n in range(TENSORS)]
FIELDS: dict[str, Any] = {
    "run": "0123abcd",
    "timeline": 1,
    "step": 100,
    "attempt": 1,
    "ordinal": 0,
    "parent": "0" * 64,
    "layout": {"shard": 1},
    "identity": {f"setting.{number}": number for number in range(100)},
    "made_by": {"torch": "2.13.0"},
    "data": {"position": 100},
    "schedule": {"lr": 0.1},
    "scaler": {},
    "counters": {},
}


def measure() -> dict[str, Any]:
    """A row per number of ranks and kind of sharding, with both formats."""
    rows = {}
    for ranks in RANKS:
        for kind in ("sharded", "replicated"):
            row = {f"format_{number}": run_alone(number, kind, ranks) for number in (1, 2)}
            rows[f"{ranks} ranks, {kind}"] = row
            print(f"{ranks} ranks, {kind}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return {"tensors": TENSORS, "rows": rows}


def run_alone(number: int, kind: str, ranks: int) -> dict[str, Any]:
    """The result of one format from a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure_format, args=(number, kind, ranks, sender))
    process.start()
    sender.close()  # a process that fails ends the wait below
    result: dict[str, Any] = receiver.recv()
    process.join()
    return result


def measure_format(number: int, kind: str, ranks: int, sender: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-manifest-") as name:
        result = (measure_format_1 if number == 1 else measure_format_2)(Path(name), kind, ranks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sender.send({key: round(value, 4) for key, value in result.items()} | {"peak_bytes": peak})


def full_shape(kind: str, ranks: int) -> tuple[int, int]:
    return (ROWS * ranks, COLUMNS) if kind == "sharded" else (ROWS, COLUMNS)


def make_part(kind: str, ranks: int, rank: int) -> ManifestPart:
    """The part that a rank writes."""
    length, regions = ROWS * COLUMNS * 4, {}
    for number, name in enumerate(NAMES):
        if kind == "sharded" or number % ranks == rank:
            offset = (ROWS * rank, 0) if kind == "sharded" else (0, 0)
            start = 4096 + len(regions) * length
            regions[name] = (TensorRegion(offset, (ROWS, COLUMNS), shard_file(rank), start, length),)
    record = FileRecord(4096 + len(regions) * length, tuple(f"{rank:032x}" for _ in range(CHUNKS)))
    origin = ShardOrigin(FIELDS["run"], 1, FIELDS["step"], 1, rank)
    state = {"noise": {"signal": 0.1234567890123 + rank, "noise": 12.34567890123}}
    return ManifestPart(origin, shard_file(rank), record, f"data/{rank}", state, regions)


def chunk_bytes(part: ManifestPart) -> int:
    return -(-part.record.size // CHUNKS)


def seeds(ranks: int) -> dict[str, int]:
    return {f"data/{rank}": 10**18 + rank for rank in range(ranks)}


def measure_format_2(root: Path, kind: str, ranks: int) -> dict[str, float]:
    store, folder = PosixStore(root), checkpoint_folder(FIELDS["step"], 1)
    (root / folder).mkdir(parents=True)
    records, sizes, seconds, tables = {}, [], 0.0, []
    numbers = {name: number for number, name in enumerate(NAMES)}
    chunk = 1 << 30 if kind == "replicated" else chunk_bytes(make_part(kind, ranks, 0))
    for rank in range(ranks):
        part = make_part(kind, ranks, rank)
        if kind == "replicated":
            part = replace_chunks(part, chunk)
        tables.append(RegionTable.from_rows(part.rows(rank, numbers)).encode())
        start = time.perf_counter()
        raw = part.encode()
        seconds += time.perf_counter() - start
        (root / folder / part_file(rank)).write_bytes(raw)
        sizes.append(len(raw))
        size, digest = part.record.size, recorded_digest(raw)
        records[part_file(rank)] = RecordedPart(rank, shard_file(rank), size, part.owner, len(raw), digest)
    tensors = {name: TensorRecord("float32", full_shape(kind, ranks)) for name in NAMES}
    manifest = Manifest(**FIELDS, rng=seeds(ranks), tensors=tensors, parts=records, chunk=chunk)
    result = {"part_bytes": max(sizes), "parts_bytes": sum(sizes), "encode_part_seconds": seconds / ranks}
    result["validate_seconds"] = timed(lambda: validate_plan(manifest, kind, ranks))
    raw = b""

    def encode() -> None:
        nonlocal raw
        manifest.validate()
        raw = manifest.encode()

    result["encode_seconds"] = timed(encode)
    (root / folder / MANIFEST_FILE).write_bytes(raw)
    result["bytes"] = len(raw)
    result["decode_seconds"] = timed(lambda: Manifest.decode(raw))
    result["list_seconds"] = timed(lambda: list_published(store))
    (entry,) = list_published(store)
    result["open_seconds"] = measure_open(entry, kind, ranks, tables)
    result["rows_bytes"] = sum(table.nbytes for table in tables)
    # What one process takes that reads every part itself: a tool, or a restore on one rank.
    result["read_all_parts_seconds"] = timed(lambda: entry.index)
    return result


def replace_chunks(part: ManifestPart, chunk: int) -> ManifestPart:
    digests = part.record.chunks[: -(-part.record.size // chunk)]
    record = FileRecord(part.record.size, digests)
    return ManifestPart(part.origin, part.file, record, part.owner, part.state, part.regions)


def validate_plan(manifest: Manifest, kind: str, ranks: int) -> None:
    """What the coordinator checks before it publishes: coverage by the plan, and the checksum of all regions."""
    boxes = []
    for name, tensor in manifest.tensors.items():
        offsets = [(ROWS * rank, 0) for rank in range(ranks)] if kind == "sharded" else [(0, 0)]
        shapes = [(ROWS, COLUMNS)] * len(offsets)
        validate_coverage(name, tensor.shape, as_columns(offsets, 2), as_columns(shapes, 2))
        boxes.append((name, offsets, shapes))
    checksum(boxes)


def measure_open(entry: CheckpointEntry, kind: str, ranks: int, received: list[Integers]) -> float:
    """Seconds of one rank from reading its own part and receiving the rows of the others to the regions that it reads.
    The collective is not in it; its bytes are those of the rows.
    """
    manifest = entry.manifest
    assert manifest is not None
    offset = (ROWS, 0) if kind == "sharded" else (0, 0)

    def open_on_rank() -> None:
        part = entry.read_part(part_file(1))
        manifest.index_regions(part_file(1), part).encode()
        table = RegionTable.merge([RegionTable.decode(rows) for rows in received])
        table.validate(manifest.tensors, slice(1, None, ranks))
        index = CheckpointIndex(manifest, table)
        assert all(len(index.intersecting(name, offset, (ROWS, COLUMNS))) == 1 for name in NAMES)

    return timed(open_on_rank)


def measure_format_1(root: Path, kind: str, ranks: int) -> dict[str, float]:
    """The same records in one file, which the coordinator validates and every rank decodes."""
    store, folder = PosixStore(root), checkpoint_folder(FIELDS["step"], 1)
    (root / folder).mkdir(parents=True)
    tensors: dict[str, Any] = {
        name: {"dtype": "float32", "shape": full_shape(kind, ranks), "pieces": []} for name in NAMES
    }
    files, owners = {}, {}
    chunk = 1 << 30 if kind == "replicated" else chunk_bytes(make_part(kind, ranks, 0))
    for rank in range(ranks):
        part = make_part(kind, ranks, rank)
        part = replace_chunks(part, chunk) if kind == "replicated" else part
        files[part.file] = {"size": part.record.size, "chunks": part.record.chunks}
        owners[part.owner] = part.state
        for name, regions in part.regions.items():
            tensors[name]["pieces"] += [vars(region) for region in regions]
    values = FIELDS | {"rng": seeds(ranks), "owners": owners, "files": files, "tensors": tensors}
    values |= {"format": 1, "chunk": chunk}
    raw = b""

    def encode() -> None:
        nonlocal raw
        raw = serialize(values, canonical_digest(values))

    result: dict[str, float] = {"encode_seconds": timed(encode)}
    path = root / folder / MANIFEST_FILE
    path.write_bytes(raw)
    result["bytes"] = len(raw)
    values.clear()
    tensors.clear()
    result["decode_seconds"] = timed(lambda: Manifest.decode(raw))
    raw = b""
    result["list_seconds"] = timed(lambda: list_published(store))
    offset = (ROWS, 0) if kind == "sharded" else (0, 0)

    def open_on_rank() -> None:
        (entry,) = list_published(store)
        assert all(len(entry.index.intersecting(name, offset, (ROWS, COLUMNS))) == 1 for name in NAMES)

    result["open_seconds"] = timed(open_on_rank)
    return result


def timed(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.manifest", description=__doc__).parse_args()
    print(json.dumps(measure(), indent=1))
