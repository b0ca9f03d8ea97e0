"""Shard files: DCP's storage writer and reader that write, hash, verify and read the bytes of the local shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint import StorageReader, StorageWriter
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

from meshwright import faults
from meshwright.checkpoint.listing import CheckpointEntry
from meshwright.checkpoint.manifest import MANIFEST_FILE, FileRecord, TensorRecord, TensorRegion
from meshwright.checkpoint.state import tensor_bytes
from meshwright.checkpoint.verify import DIGEST_THREADS, DigestingSink
from meshwright.config import BLOCK_SIZES, BlockSizes
from meshwright.errors import CheckpointError
from meshwright.store.interface import Store

TENSOR_ALIGNMENT = 64
"""The alignment in bytes of every region in a shard."""
ChunkKey = tuple[str, int]
"""The file of a chunk, and its index in that file."""
PublishManifest = Callable[[dict[str, FileRecord], dict[str, TensorRecord], dict[str, dict[str, Any]]], None]
"""(files, tensors, owners) -> the manifest is published."""


@dataclass(frozen=True)
class WrittenShard:
    """What a rank reports to the coordinator: the record of its file, and the non-tensor state that it owns."""

    file: str
    record: FileRecord
    owner: str
    owner_state: dict[str, Any]


class ShardWriter(StorageWriter):
    """Writes the local shards of one rank to one file. The coordinator then publishes the manifest."""

    def __init__(
        self,
        store: Store,
        folder: str,
        rank: int,
        step: int,
        header: bytes,
        owner: tuple[str, dict[str, Any]],
        publish: PublishManifest,
        block_sizes: BlockSizes = BLOCK_SIZES,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`publish` runs on the coordinator; `on_written` runs once the file of this rank is durable."""
        self.store, self.folder, self.step, self.header = store, folder, step, header
        self.file = f"rank-{rank:05d}.shard"
        self.owner, self.publish, self.on_written, self.block_sizes = owner, publish, on_written, block_sizes
        self.written_bytes = 0
        self.record = FileRecord(0, ())

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        faults.fail_point("save.begin", self.step)
        path = f"{self.folder}/{self.file}"
        if self.store.size(f"{self.folder}/{MANIFEST_FILE}") is not None:
            raise CheckpointError(
                f"{self.folder} is published, although its save failed, and is not overwritten",
                "try the same command again: it resumes from the newest intact checkpoint",
            )
        if self.store.size(path) is not None:
            self.store.remove(path)  # an earlier save of this step has failed
        sink = DigestingSink(self.store.create(path), self.block_sizes)
        results = []
        try:
            sink.write(self.header)
            for item in plan.items:
                faults.fail_point("save.write", self.step)
                data = planner.resolve_data(item)
                if not isinstance(data, torch.Tensor):
                    raise TypeError(f"{item.index.fqn} is not a tensor: it belongs in the manifest")
                sink.write(bytes(-sink.size % TENSOR_ALIGNMENT))
                content = tensor_bytes(data.cpu())
                results.append(WriteResult(item.index, len(content), self._region(item, sink.size, len(content))))
                sink.write(content)
                self.written_bytes += len(content)
            sink.close()
        finally:
            sink.abort()
        faults.fail_point("save.after_shard", self.step)
        self.record = FileRecord(sink.size, tuple(sink.chunks))
        self.on_written()
        shard = WrittenShard(self.file, self.record, *self.owner)
        results.append(WriteResult(MetadataIndex(self.file), sink.size, shard))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _region(self, item: WriteItem, start: int, length: int) -> TensorRegion:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return TensorRegion(tuple(chunk.offsets), tuple(chunk.sizes), self.file, start, length)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: combine the reports of all ranks and publish the manifest."""
        files: dict[str, FileRecord] = {}
        owners: dict[str, dict[str, Any]] = {}
        regions: dict[str, list[TensorRegion]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for rank_results in results for result in rank_results):
            if isinstance(result.storage_data, WrittenShard):
                files[result.storage_data.file] = result.storage_data.record
                owners[result.storage_data.owner] = result.storage_data.owner_state
            else:
                regions[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = TensorRecord(dtype, tuple(tensor.size), tuple(regions[name]))
        self.publish(files, tensors, owners)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


class ShardReader(StorageReader):
    """Copies the regions of a checkpoint into local shards of any layout. Every chunk is verified as it is read:
    threads read and verify the next chunks meanwhile.
    """

    def __init__(
        self, entry: CheckpointEntry, progress: Callable[[], None], io_bytes: int = BLOCK_SIZES.io_bytes
    ) -> None:
        self.entry, self.progress, self.io_bytes = entry, progress, io_bytes
        assert entry.manifest is not None
        self.manifest, self.tensors = entry.manifest, entry.manifest.tensors
        self.regions = {(n, region.offset): region for n, record in self.tensors.items() for region in record.regions}
        self.chunks: Iterator[tuple[ChunkKey, torch.Tensor]] = iter(())
        """The chunks to come, in file order."""
        self.chunk: tuple[ChunkKey, torch.Tensor] = ("", -1), torch.empty(0, dtype=torch.uint8)
        """The current chunk: its file and index, and its verified bytes."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """DCP's metadata, rebuilt from the manifest."""
        tensors: dict[str, Any] = {}
        for name, record in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(r.offset), torch.Size(r.shape)) for r in record.regions]
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
        size = min(self.manifest.chunk, max((file.size for file in self.manifest.files.values()), default=0))
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
        path, expected = f"{self.entry.folder}/{file}", self.manifest.files[file].chunks[index]
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


def file_position(region: TensorRegion) -> tuple[str, int]:
    return region.file, region.start
