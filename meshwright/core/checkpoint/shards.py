"""Shard files: DCP's storage writer and reader that write, hash, verify and read the bytes of the local shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.format.canonical import recorded_digest
from meshwright.base.checkpoint.format.index import require_parts
from meshwright.base.checkpoint.format.manifest_parts import (
    MAX_PART_BYTES,
    FileRecord,
    ManifestPart,
    RecordedPart,
    ShardOrigin,
    part_file,
    shard_file,
)
from meshwright.base.checkpoint.format.regions import (
    TensorRecord,
    TensorRegion,
    as_columns,
    checksum,
    validate_coverage,
)
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import MANIFEST_FILE
from meshwright.base.store.interface import OutcomeUnknown, Store
from meshwright.core import faults
from meshwright.core.checkpoint.state import tensor_bytes
from meshwright.core.checkpoint.verify import DIGEST_THREADS, DigestingSink, shard_header
from meshwright.errors import CheckpointError, MeshwrightError, PeerError, is_peer_loss

TENSOR_ALIGNMENT = 64
"""The alignment in bytes of every region in a shard."""
ChunkKey = tuple[str, int]
"""The file of a chunk, and its index in that file."""
PublishManifest = Callable[[dict[str, RecordedPart], dict[str, TensorRecord]], None]
"""(parts, tensors) -> the manifest is published."""


@dataclass(frozen=True)
class WrittenPart:
    """What a rank reports to the coordinator: the record of its part, and a summary of the regions that it wrote."""

    name: str
    record: RecordedPart
    regions: int
    """The number of regions."""
    checksum: int
    """The checksum of their tensors, offsets and shapes."""


class ShardWriter(StorageWriter):
    """Writes the local shards of one rank to one file. The coordinator then publishes the manifest."""

    def __init__(
        self,
        store: Store,
        folder: str,
        origin: ShardOrigin,
        owner: tuple[str, dict[str, Any]],
        publish: PublishManifest,
        block_sizes: BlockSizes = BLOCK_SIZES,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`owner` is the logical owner that this rank stands for, and its non-tensor state. `publish` runs on the
        coordinator; `on_written` runs once the files of this rank are durable.
        """
        self.store, self.folder, self.origin, self.owner = store, folder, origin, owner
        self.file, self.part = shard_file(origin.rank), part_file(origin.rank)
        self.publish, self.on_written, self.block_sizes = publish, on_written, block_sizes
        self.written_bytes = 0
        self.record = FileRecord(0, ())
        self.part_content = b""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        step = self.origin.step
        faults.fail_point("save.begin", step)
        if self.store.size(f"{self.folder}/{MANIFEST_FILE}") is not None:
            raise CheckpointError(
                f"{self.folder} is published, although its save failed, and is not overwritten",
                "try the same command again: it resumes from the newest intact checkpoint",
            )
        for name in (self.part, self.file):
            if self.store.size(f"{self.folder}/{name}") is not None:
                self.store.remove(f"{self.folder}/{name}")  # an earlier save of this step has failed
        sink = DigestingSink(self.store.create(f"{self.folder}/{self.file}"), self.block_sizes)
        regions: dict[str, list[TensorRegion]] = {}
        try:
            sink.write(shard_header(self.origin))
            for item in plan.items:
                faults.fail_point("save.write", step)
                data = planner.resolve_data(item)
                if not isinstance(data, torch.Tensor):
                    raise TypeError(f"{item.index.fqn} is not a tensor: it belongs in the manifest")
                sink.write(bytes(-sink.size % TENSOR_ALIGNMENT))
                content = tensor_bytes(data.cpu())
                regions.setdefault(item.index.fqn, []).append(self._region(item, sink.size, len(content)))
                sink.write(content)
                self.written_bytes += len(content)
            sink.close()
        finally:
            sink.abort()
        faults.fail_point("save.after_shard", step)
        self.record = FileRecord(sink.size, tuple(sink.chunks))
        written = self._write_part(plan, regions)
        faults.fail_point("save.after_part", step)
        self.on_written()
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(self.part), written.record.size, written)])
        return future

    def _write_part(self, plan: SavePlan, regions: dict[str, list[TensorRegion]]) -> WrittenPart:
        """Write the part of this rank, durably."""
        stored = {name: tuple(of_tensor) for name, of_tensor in regions.items()}
        part = ManifestPart(self.origin, self.file, self.record, *self.owner, stored)
        part.validate(planned_tensors(plan), self.block_sizes.digest_bytes)
        self.part_content = part.encode()
        if len(self.part_content) > MAX_PART_BYTES:
            raise CheckpointError(
                f"{self.part} of {self.folder} has {len(self.part_content):,} bytes, more than {MAX_PART_BYTES:,}"
            )
        sink = self.store.create(f"{self.folder}/{self.part}")
        try:
            sink.write(self.part_content)
            sink.close()
        finally:
            sink.abort()
        size, digest = len(self.part_content), recorded_digest(self.part_content)
        record = RecordedPart(self.origin.rank, self.file, self.record.size, self.owner[0], size, digest)
        boxes = [
            (name, [region.offset for region in of_tensor], [region.shape for region in of_tensor])
            for name, of_tensor in stored.items()
        ]
        return WrittenPart(self.part, record, sum(map(len, stored.values())), checksum(boxes))

    def _region(self, item: WriteItem, start: int, length: int) -> TensorRegion:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return TensorRegion(tuple(chunk.offsets), tuple(chunk.sizes), self.file, start, length)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check that all ranks together wrote every tensor exactly once, and publish the manifest.

        The regions are those of DCP's plan, which the coordinator has made; the checksums of the ranks show that they
        wrote these regions and no others.
        """
        written = sorted((of_rank[0].storage_data for of_rank in results), key=lambda part: part.record.rank)
        tensors, boxes, regions = {}, [], 0
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = TensorRecord(str(tensor.properties.dtype).removeprefix("torch."), tuple(tensor.size))
            offsets, sizes = [chunk.offsets for chunk in tensor.chunks], [chunk.sizes for chunk in tensor.chunks]
            dimensions = len(tensor.size)
            validate_coverage(name, tensors[name].shape, as_columns(offsets, dimensions), as_columns(sizes, dimensions))
            boxes.append((name, offsets, sizes))
            regions += len(offsets)
        found = sum(part.regions for part in written), sum(part.checksum for part in written) % (1 << 64)
        if found != (regions, checksum(boxes)):
            raise CheckpointError(f"{self.folder}: the ranks wrote {found[0]} regions, and not the {regions} planned")
        self.publish({part.name: part.record for part in written}, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


class ShardReader(StorageReader):
    """Copies the regions of a checkpoint into local shards of any layout. Every chunk is verified as it is read:
    threads read and verify the next chunks meanwhile.
    """

    def __init__(
        self,
        entry: CheckpointEntry,
        regions: Mapping[str, Sequence[TensorRegion]],
        progress: Callable[[], None],
        io_bytes: int = BLOCK_SIZES.io_bytes,
    ) -> None:
        """`regions` are those that the local shards of this rank intersect, by the name of their tensor."""
        self.entry, self.progress, self.io_bytes = entry, progress, io_bytes
        assert entry.manifest is not None
        self.manifest, self.tensors = entry.manifest, entry.manifest.tensors
        self.regions = {(name, region.offset): region for name, found in regions.items() for region in found}
        self.files: dict[str, FileRecord] = {}
        """The records of the shards that this rank reads."""
        self.chunks: Iterator[tuple[ChunkKey, torch.Tensor]] = iter(())
        """The chunks to come, in file order."""
        self.chunk: tuple[ChunkKey, torch.Tensor] = ("", -1), torch.empty(0, dtype=torch.uint8)
        """The current chunk: its file and index, and its verified bytes."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """DCP's metadata, rebuilt from the manifest, with the regions that this rank reads."""
        tensors: dict[str, Any] = {}
        regions: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.tensors}
        for (name, _), region in self.regions.items():
            regions[name].append(ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape)))
        for name, record in self.tensors.items():
            chunks = regions[name]
            properties = TensorProperties(dtype=getattr(torch, record.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the regions in file order, so that each chunk is read and verified once."""
        items = sorted(((self._region(item), item) for item in plan.items), key=lambda pair: file_position(pair[0]))
        targets = [planner.resolve_tensor(item).detach() for _, item in items]
        keys = dict.fromkeys(key for region, _ in items for key in self._chunk_keys(region))
        self._read_records({file for file, _ in keys})
        pinned = any(target.is_cuda for target in targets)
        with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="reader") as threads:
            self.chunks = self._read_ahead(list(keys), threads, pinned)
            for (region, item), target in zip(items, targets, strict=True):
                self._load(region, item, target)
                planner.commit_tensor(item, target)
                self.progress()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_records(self, files: set[str]) -> None:
        """Read the digests of the shards that this rank reads from their parts."""
        names = [name for name, part in self.manifest.parts.items() if part.file in files]
        parts = require_parts(self.entry.store, self.entry.folder, self.manifest, names)
        self.files = {part.file: part.record for _, part in parts}

    def _load(self, region: TensorRegion, item: ReadItem, target: torch.Tensor) -> None:
        """Copy a region, or the part of it that another layout needs, into a tensor of this rank."""
        dtype = getattr(torch, self.tensors[item.storage_index.fqn].dtype)
        if tuple(item.lengths) == region.shape and target.is_contiguous() and target.dtype == dtype:
            self._read_region(region, target)
            return
        stored = torch.empty(region.shape, dtype=dtype)
        self._read_region(region, stored)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        target.copy_(stored)

    def _region(self, item: ReadItem) -> TensorRegion:
        return self.regions[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    def _chunk_keys(self, region: TensorRegion) -> list[ChunkKey]:
        """The chunks that contain a region."""
        first, end = region.start // self.manifest.chunk, -(-(region.start + region.length) // self.manifest.chunk)
        return [(region.file, index) for index in range(first, end)] if region.length else []

    def _read_region(self, region: TensorRegion, target: torch.Tensor) -> None:
        """Copy the bytes of a region into a contiguous tensor."""
        flat = target.reshape(-1).view(torch.uint8) if region.length else target
        filled, begin = 0, region.start % self.manifest.chunk
        for key in self._chunk_keys(region):
            while self.chunk[0] != key:
                self.chunk = next(self.chunks)
            part = self.chunk[1][begin : begin + region.length - filled]
            flat[filled : filled + len(part)].copy_(part)
            filled, begin = filled + len(part), 0

    def _read_ahead(
        self, keys: list[ChunkKey], threads: ThreadPoolExecutor, pinned: bool
    ) -> Iterator[tuple[ChunkKey, torch.Tensor]]:
        """The verified chunks in order. A chunk is valid until the next one: its buffer is then reused."""
        size = min(self.manifest.chunk, max((record.size for record in self.files.values()), default=0))
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(DIGEST_THREADS + 1)]
        reading: deque[Any] = deque()
        for number in range(len(keys) + DIGEST_THREADS):
            if number < len(keys):
                reading.append(threads.submit(self._read_chunk, *keys[number], buffers[number % len(buffers)]))
            if number >= DIGEST_THREADS:
                yield keys[number - DIGEST_THREADS], reading.popleft().result()

    def _read_chunk(self, file: str, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Read a chunk into a buffer and verify it there: the bytes that are copied are the verified ones."""
        size, state, filled = self.manifest.chunk, xxhash.xxh3_128(), 0
        path, expected = f"{self.entry.folder}/{file}", self.files[file].chunks[index]
        while filled < size:  # in blocks that remain in the CPU cache between the read and the hash
            content = self.entry.store.read(path, index * size + filled, min(self.io_bytes, size - filled))
            block = buffer[filled : filled + len(content)].numpy()
            block[:] = np.frombuffer(content, np.uint8)
            state.update(block.data)
            filled += len(content)
            if len(content) < self.io_bytes:
                break
        if (found := state.hexdigest()) != expected:
            raise CheckpointError(
                f"{self.entry.name} changed while it was read: {file} chunk {index}: expected {expected}, found {found}"
            )
        return buffer[:filled]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


def planned_tensors(plan: SavePlan) -> dict[str, TensorRecord]:
    """The tensors of which a rank writes regions."""
    tensors = {}
    for item in plan.items:
        assert item.tensor_data is not None
        dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
        tensors[item.index.fqn] = TensorRecord(dtype, tuple(item.tensor_data.size))
    return tensors


def file_position(region: TensorRegion) -> tuple[str, int]:
    return region.file, region.start


def to_save_error(error: BaseException, folder: str, published: bool) -> MeshwrightError:
    """The error of a failed save in one line: which rank, which checkpoint, what became of it, and why."""
    rank = None
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items())
    if isinstance(error, MeshwrightError):
        return error
    if is_peer_loss(error):  # only rank 0 knows whether it has published before
        return PeerError(f"the save of {folder} has ended: another rank was lost ({str(error).splitlines()[0][:120]})")
    outcome = "is published, but was not verified" if published else "was not saved"
    if isinstance(error, OutcomeUnknown):
        outcome = "may be published, which is unknown"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    prefix = f"rank {rank}: " if rank is not None else ""
    return CheckpointError(f"{prefix}{folder} {outcome}: {reason}; earlier checkpoints, if any, are intact")
