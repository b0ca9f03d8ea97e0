"""Shard files: DCP's storage writer and reader that write, hash, verify and read the bytes of the local shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

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
from meshwright.checkpoint.verify import DigestingSink
from meshwright.config import BLOCK_SIZES, BlockSizes
from meshwright.errors import CheckpointError
from meshwright.store.interface import Store

TENSOR_ALIGNMENT = 64
"""The alignment in bytes of every region in a shard."""
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
    """Copies the regions of a checkpoint into local shards of any layout. Every chunk is verified as it is read."""

    def __init__(
        self, entry: CheckpointEntry, progress: Callable[[], None], io_bytes: int = BLOCK_SIZES.io_bytes
    ) -> None:
        self.entry, self.progress, self.io_bytes = entry, progress, io_bytes
        assert entry.manifest is not None
        self.manifest, self.tensors = entry.manifest, entry.manifest.tensors
        self.regions = {(n, region.offset): region for n, record in self.tensors.items() for region in record.regions}
        largest_file = max((file.size for file in entry.manifest.files.values()), default=0)
        self.buffer = bytearray(min(entry.manifest.chunk, largest_file))
        self.buffered = ("", -1, 0)
        """The chunk in the buffer: its file, its index and its size in bytes."""

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
        for region, item in sorted(((self._region(i), i) for i in plan.items), key=lambda pair: file_position(pair[0])):
            target = planner.resolve_tensor(item).detach()
            if prod(region.shape):
                tensor = self._read_region(region, self.tensors[item.storage_index.fqn].dtype)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    tensor = tensor.narrow(dim, start, length)
                target.copy_(tensor)
            planner.commit_tensor(item, target)
            self.progress()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _region(self, item: ReadItem) -> TensorRegion:
        return self.regions[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    def _read_region(self, region: TensorRegion, dtype: str) -> torch.Tensor:
        index, begin = divmod(region.start, self.manifest.chunk)
        raw: bytearray | memoryview = self._read_chunk(region.file, index)[begin : begin + region.length]
        if len(raw) < region.length:  # the region continues in the next chunks
            raw = bytearray(raw)
            while len(raw) < region.length:
                index += 1
                raw += self._read_chunk(region.file, index)[: region.length - len(raw)]
        return torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(region.shape)

    def _read_chunk(self, file: str, index: int) -> memoryview:
        """Read a chunk into the buffer and verify it there: the bytes that are copied are the verified ones."""
        if self.buffered[:2] != (file, index):
            self.buffered = ("", -1, 0)
            size, state, filled = self.manifest.chunk, xxhash.xxh3_128(), 0
            path, expected = f"{self.entry.folder}/{file}", self.manifest.files[file].chunks[index]
            while filled < size:  # in blocks that remain in the CPU cache between the read and the hash
                content = self.entry.store.read(path, index * size + filled, min(self.io_bytes, size - filled))
                self.buffer[filled : filled + len(content)] = content
                state.update(content)
                filled += len(content)
                if len(content) < self.io_bytes:
                    break
            if (found := state.hexdigest()) != expected:
                raise CheckpointError(
                    f"{self.entry.name} changed while it was read: {file} chunk {index}: "
                    f"expected {expected}, found {found}"
                )
            self.buffered = (file, index, filled)
        return memoryview(self.buffer)[: self.buffered[2]]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


def file_position(region: TensorRegion) -> tuple[str, int]:
    return region.file, region.start
