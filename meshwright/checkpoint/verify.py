"""Whether a checkpoint's files are, byte for byte, what was in memory when they were written. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from meshwright.checkpoint.listing import CheckpointEntry
from meshwright.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest
from meshwright.store.interface import Buffer, Sink, Store

SHARD_HEADER_BYTES = 4096
"""A shard begins with who wrote it, so that one in the wrong place can say where it belongs."""
IO_BLOCK_BYTES = 1 << 20
"""Bytes that are moved and then digested at once: few enough to be still in the processor's cache."""


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file, and where in it. `chunk` is -1 where the whole file is meant."""

    file: str
    chunk: int
    expected: str
    found: str

    def __str__(self) -> str:
        where = self.file if self.chunk < 0 else f"{self.file} chunk {self.chunk}"
        return f"{where}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DigestingSink:
    """A sink that digests what it is given, chunk by chunk, from the memory that it is written from."""

    def __init__(self, sink: Sink, chunk: int) -> None:
        self.sink, self.chunk, self.size = sink, chunk, 0
        self.chunks: list[str] = []
        self.state = xxhash.xxh3_128()

    def write(self, content: Buffer) -> None:
        view = memoryview(content).cast("B")
        while view:
            part = view[: min(IO_BLOCK_BYTES, self.chunk - self.size % self.chunk)]
            self.sink.write(part)
            self.state.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % self.chunk == 0:
                self._cut()

    def close(self) -> None:
        if self.size % self.chunk:
            self._cut()
        self.sink.close()

    def _cut(self) -> None:
        self.chunks.append(self.state.hexdigest())
        self.state.reset()


def shard_header(run: str, timeline: int, step: int, attempt: int, rank: int) -> bytes:
    facts = {"run": run, "timeline": timeline, "step": step, "attempt": attempt, "rank": rank}
    return (b"meshwright shard " + json.dumps(facts).encode() + b"\n").ljust(SHARD_HEADER_BYTES, b"\0")


def describe_shard(store: Store, path: str) -> str:
    """What a shard's own header says of it."""
    try:
        line = store.read(path, 0, SHARD_HEADER_BYTES).partition(b"\n")[0].removeprefix(b"meshwright shard ")
        facts = json.loads(line)
        return "step {step}, attempt {attempt}, rank {rank} of run {run}".format(**facts)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return ""


def find_damage(
    entry: CheckpointEntry, files: list[str] | None = None, progress: Callable[[], None] = lambda: None
) -> list[Damage]:
    """Everything wrong with a published checkpoint (or with some of its files); an intact one gives nothing."""
    if entry.manifest is None:
        return [Damage(MANIFEST_FILE, -1, "a whole manifest", entry.problem)]
    names = list(entry.manifest.files) if files is None else files
    found = [damage for name in names for damage in find_file_damage(entry, name, progress)]
    known = {*entry.manifest.files, MANIFEST_FILE}
    for name in entry.store.list_names(entry.folder):
        if name not in known and not name.startswith("."):
            found.append(Damage(name, -1, "no such file", "a file that the manifest does not know"))
    return found


def find_file_damage(entry: CheckpointEntry, name: str, progress: Callable[[], None]) -> Iterator[Damage]:
    manifest = entry.manifest
    assert manifest is not None
    path = f"{entry.folder}/{name}"
    for damage in verify_file(entry.store, path, manifest.files[name], manifest.chunk, progress):
        yield replace(damage, found=damage.found + misplaced_shard_note(entry, manifest, path))


def verify_file(
    store: Store, path: str, record: FileRecord, chunk: int, progress: Callable[[], None] = lambda: None
) -> Iterator[Damage]:
    """How a file on disk differs from what was written."""
    name = path.rpartition("/")[2]
    try:
        size = store.size(path)
    except OSError as error:
        yield Damage(name, -1, f"{record.size:,} bytes", f"a read error ({error.strerror})")
        return
    if size != record.size:
        yield Damage(name, -1, f"{record.size:,} bytes", "no file" if size is None else f"{size:,} bytes")
        return
    for index, expected in enumerate(record.chunks):
        progress()
        try:
            found = digest_range(store, path, index * chunk, chunk)
        except OSError as error:
            found = f"a read error ({error.strerror})"
        if found != expected:
            yield Damage(name, index, expected, found)


def digest_range(store: Store, path: str, start: int, length: int) -> str:
    state = xxhash.xxh3_128()
    for place in range(start, start + length, IO_BLOCK_BYTES):
        content = store.read(path, place, min(IO_BLOCK_BYTES, start + length - place))
        state.update(content)
        if len(content) < IO_BLOCK_BYTES:
            break
    return str(state.hexdigest())


def misplaced_shard_note(entry: CheckpointEntry, manifest: Manifest, path: str) -> str:
    """Says so where the file is a shard of another step, attempt, rank or run."""
    says = describe_shard(entry.store, path)
    rank = path.rpartition("rank-")[2].removesuffix(".shard").lstrip("0") or "0"
    own = f"step {manifest.step}, attempt {manifest.attempt}, rank {rank} of run {manifest.run}"
    return f" (it is the shard of {says})" if says and says != own else ""
