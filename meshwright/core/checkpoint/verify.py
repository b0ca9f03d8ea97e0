"""Verifies that the files of a checkpoint are, byte for byte, what was in memory when they were written. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.format.canonical import InvalidManifest
from meshwright.base.checkpoint.format.index import read_parts
from meshwright.base.checkpoint.format.manifest_parts import FileRecord, InvalidPart, ManifestPart, ShardOrigin
from meshwright.base.checkpoint.format.regions import RegionTable
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, Manifest
from meshwright.base.store.interface import Buffer, Sink, Store

SHARD_HEADER_BYTES = 4096
"""A shard begins with a header that names its run, step, attempt and rank: a misplaced file can then be identified."""
SHARD_MAGIC = b"meshwright shard "
DIGEST_THREADS = min(8, os.cpu_count() or 1)
"""Threads that hash chunks. Reading, hashing and writing release the interpreter lock."""
WHOLE_FILE = -1
"""The `chunk` of a damage that concerns the complete file."""


@dataclass(frozen=True)
class Damage:
    """A difference between a file and its record in the manifest."""

    file: str
    chunk: int
    expected: str
    found: str

    def __str__(self) -> str:
        where = self.file if self.chunk == WHOLE_FILE else f"{self.file} chunk {self.chunk}"
        return f"{where}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DigestingSink:
    """A sink that hashes what it writes, chunk by chunk, from the memory that is written: a later read error of the
    storage is then always detected. Threads hash while others write, so the content must not change before `close`.
    """

    def __init__(self, sink: Sink, block_sizes: BlockSizes = BLOCK_SIZES) -> None:
        self.sink, self.chunk, self.size = sink, block_sizes.digest_bytes, 0
        self.parts: list[memoryview] = []
        """The content of the chunk that is not complete yet."""
        self.threads = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="digest")
        self.digests: list[Future[str]] = []
        self.chunks: list[str] = []
        """The digest of every chunk, once the sink is closed."""

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        while view:
            part = view[: self.chunk - self.size % self.chunk]
            self.parts.append(part)
            self.size += len(part)
            if self.size % self.chunk == 0:
                self._end_chunk()
            self.sink.write(part)
            view = view[len(part) :]

    def close(self) -> None:
        if self.parts:
            self._end_chunk()
        self.sink.close()
        self.chunks = [digest.result() for digest in self.digests]

    def abort(self) -> None:
        """Release the file handle and the threads. A call after `close` has no further effect."""
        self.threads.shutdown(cancel_futures=True)
        self.sink.abort()

    def _end_chunk(self) -> None:
        self.digests.append(self.threads.submit(digest_parts, self.parts))
        self.parts = []


def digest_parts(parts: list[memoryview]) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return str(state.hexdigest())


def shard_header(origin: ShardOrigin) -> bytes:
    return (SHARD_MAGIC + json.dumps(asdict(origin)).encode() + b"\n").ljust(SHARD_HEADER_BYTES, b"\0")


def describe_shard(store: Store, path: str) -> str:
    """The step, attempt, rank and run in the header of a shard; '' if it has no valid header."""
    try:
        line = store.read(path, 0, SHARD_HEADER_BYTES).partition(b"\n")[0].removeprefix(SHARD_MAGIC)
        return "step {step}, attempt {attempt}, rank {rank} of run {run}".format(**json.loads(line))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return ""


def find_damage(
    entry: CheckpointEntry,
    parts: list[str] | None = None,
    progress: Callable[[], None] = lambda: None,
    io_bytes: int = BLOCK_SIZES.io_bytes,
    threads: int = 1,
) -> list[Damage]:
    """Every damage of a published checkpoint, or of some of its parts and their shards; an intact checkpoint has none.
    Whether the parts cover every tensor exactly once is checked only if all of them are read.
    """
    manifest = entry.manifest
    if manifest is None:
        return [Damage(MANIFEST_FILE, WHOLE_FILE, "a valid manifest", entry.problem)]
    damage, tables = [], []
    names = list(manifest.parts) if parts is None else parts
    for name, part in read_parts(entry.store, entry.folder, manifest, names):
        if isinstance(part, Exception):
            damage.append(part_damage(manifest, name, part))
            continue
        damage += find_shard_damage(entry, part, progress, io_bytes, threads)
        if parts is None:
            tables.append(manifest.index_regions(name, part))
    known = {MANIFEST_FILE, *manifest.parts, *(part.file for part in manifest.parts.values())}
    for name in entry.store.list_names(entry.folder):
        if name not in known and not name.startswith("."):
            damage.append(Damage(name, WHOLE_FILE, "no such file", "a file that the manifest does not list"))
    if parts is None and not damage:
        damage += find_uncovered(manifest, RegionTable.merge(tables))
    return damage


def part_damage(manifest: Manifest, name: str, problem: Exception) -> Damage:
    """The damage of a part that cannot be read."""
    if isinstance(problem, InvalidPart):
        return Damage(name, WHOLE_FILE, problem.expected, problem.found)
    missing = isinstance(problem, FileNotFoundError)
    found = "no file" if missing else f"a read error ({getattr(problem, 'strerror', None) or problem})"
    return Damage(name, WHOLE_FILE, f"{manifest.parts[name].size:,} bytes", found)


def find_uncovered(manifest: Manifest, table: RegionTable, share: slice = slice(None)) -> list[Damage]:
    """The damage of parts that are intact but do not cover the tensors, or a share of them, exactly once."""
    try:
        table.validate(manifest.tensors, share)
    except InvalidManifest as problem:
        return [Damage(MANIFEST_FILE, WHOLE_FILE, "parts that cover every tensor exactly once", str(problem))]
    return []


def find_shard_damage(
    entry: CheckpointEntry, part: ManifestPart, progress: Callable[[], None], io_bytes: int, threads: int
) -> Iterator[Damage]:
    assert entry.manifest is not None
    path, chunk = f"{entry.folder}/{part.file}", entry.manifest.chunk
    for damage in verify_file(entry.store, path, part.record, chunk, progress, io_bytes, threads):
        found = describe_shard(entry.store, path)
        note = f" (it is the shard of {found})" if found and found != str(part.origin) else ""
        yield replace(damage, found=damage.found + note)


def verify_file(
    store: Store,
    path: str,
    record: FileRecord,
    chunk: int,
    progress: Callable[[], None],
    io_bytes: int,
    threads: int = 1,
) -> Iterator[Damage]:
    """Compare a file with its record: first the size, then the digest of every chunk, on this or on more threads."""
    name = path.rpartition("/")[2]
    try:
        size = store.size(path)
    except OSError as error:
        yield Damage(name, WHOLE_FILE, f"{record.size:,} bytes", f"a read error ({error.strerror})")
        return
    if size != record.size:
        yield Damage(name, WHOLE_FILE, f"{record.size:,} bytes", "no file" if size is None else f"{size:,} bytes")
        return

    def digest(index: int) -> str:
        try:
            return digest_range(store, path, index * chunk, chunk, io_bytes)
        except OSError as error:
            return f"a read error ({error.strerror})"

    pool = ThreadPoolExecutor(threads, thread_name_prefix="verify") if threads > 1 else None
    try:
        digests = (pool.map if pool else map)(digest, range(len(record.chunks)))
        for index, (expected, found) in enumerate(zip(record.chunks, digests, strict=True)):
            progress()
            if found != expected:
                yield Damage(name, index, expected, found)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def verify_content(store: Store, path: str, content: bytes) -> Damage | None:
    """Compare a small file with the content that was written."""
    try:
        found = store.read(path, 0, len(content) + 1)
    except OSError as error:
        return Damage(
            path.rpartition("/")[2], WHOLE_FILE, "the content that was written", f"a read error ({error.strerror})"
        )
    if found == content:
        return None
    return Damage(path.rpartition("/")[2], WHOLE_FILE, "the content that was written", "other content")


def digest_range(store: Store, path: str, start: int, length: int, io_bytes: int) -> str:
    """The digest of a byte range of a file, up to the end of the file."""
    state = xxhash.xxh3_128()
    for offset in range(start, start + length, io_bytes):
        content = store.read(path, offset, min(io_bytes, start + length - offset))
        state.update(content)
        if len(content) < io_bytes:
            break
    return str(state.hexdigest())
