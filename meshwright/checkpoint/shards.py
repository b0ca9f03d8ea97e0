"""DCP's planner over our own bytes: it says which rank keeps which block, we write, digest and read the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright import faults
from meshwright.checkpoint.listing import CheckpointEntry
from meshwright.checkpoint.manifest import DIGEST_CHUNK_BYTES, MANIFEST_FILE, FileRecord, TensorRecord, TensorRegion
from meshwright.checkpoint.state import CheckpointState, dtype_name, tensor_bytes
from meshwright.checkpoint.verify import IO_BLOCK_BYTES, DigestingSink
from meshwright.errors import CheckpointError
from meshwright.parallel.local_shard import LocalShard, local_shard
from meshwright.store.interface import Store

TENSOR_ALIGNMENT = 64
PublishManifest = Callable[[dict[str, FileRecord], dict[str, TensorRecord], dict[str, dict[str, Any]]], None]
"""(files, tensors, owners) -> the manifest is in place"""


@dataclass(frozen=True)
class WrittenShard:
    """What a rank tells the coordinator of its own file, and of the small state that it owns."""

    file: str
    record: FileRecord
    owner: str
    owner_state: dict[str, Any]


class ShardWriter(StorageWriter):
    """One rank's part of a save: a file of blocks. The coordinator then publishes."""

    def __init__(
        self,
        store: Store,
        folder: str,
        rank: int,
        step: int,
        header: bytes,
        owner: tuple[str, dict[str, Any]],
        publish: PublishManifest,
        chunk: int = DIGEST_CHUNK_BYTES,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.folder, self.step, self.header = store, folder, step, header
        self.file = f"rank-{rank:05d}.shard"
        self.owner, self.publish, self.on_written, self.chunk = owner, publish, written, chunk
        self.written = 0
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
        if self.store.size(path) is not None and self.store.size(f"{self.folder}/{MANIFEST_FILE}") is None:
            self.store.remove(path)  # of a save of this very step that failed
        sink = DigestingSink(self.store.create(path), self.chunk)
        results = []
        try:
            sink.write(self.header)
            for item in plan.items:
                faults.fail_point("save.write", self.step)
                data = planner.resolve_data(item)
                if not isinstance(data, torch.Tensor):
                    raise TypeError(f"{item.index.fqn} is no tensor: it belongs into the manifest")
                sink.write(bytes(-sink.size % TENSOR_ALIGNMENT))
                block = tensor_bytes(data.cpu())
                results.append(WriteResult(item.index, len(block), self._piece(item, sink.size, len(block))))
                sink.write(block)
                self.written += len(block)
            sink.close()
        finally:
            sink.sink.abort()
        faults.fail_point("save.after_shard", self.step)
        self.record = FileRecord(sink.size, tuple(sink.chunks))
        self.on_written()
        shard = WrittenShard(self.file, self.record, *self.owner)
        results.append(WriteResult(MetadataIndex(self.file), sink.size, shard))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _piece(self, item: WriteItem, start: int, length: int) -> TensorRegion:
        assert item.tensor_data is not None
        where = item.tensor_data.chunk
        return TensorRegion(tuple(where.offsets), tuple(where.sizes), self.file, start, length)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileRecord] = {}
        owners: dict[str, dict[str, Any]] = {}
        pieces: dict[str, list[TensorRegion]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for rank in results for result in rank):
            if isinstance(result.storage_data, WrittenShard):
                files[result.storage_data.file] = result.storage_data.record
                owners[result.storage_data.owner] = result.storage_data.owner_state
            else:
                pieces[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, known in metadata.state_dict_metadata.items():
            assert isinstance(known, TensorStorageMetadata)
            dtype = str(known.properties.dtype).removeprefix("torch.")
            tensors[name] = TensorRecord(dtype, tuple(known.size), tuple(pieces[name]))
        self.publish(files, tensors, owners)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


class ShardReader(StorageReader):
    """Copies a verified checkpoint's blocks into whatever layout asks for them."""

    def __init__(self, entry: CheckpointEntry, progress: Callable[[], None]) -> None:
        self.entry, self.progress = entry, progress
        assert entry.manifest is not None
        self.manifest, self.tensors = entry.manifest, entry.manifest.tensors
        self.regions = {(n, piece.offset): piece for n, record in self.tensors.items() for piece in record.regions}
        self.buffer = bytearray(
            min(entry.manifest.chunk, max((f.size for f in entry.manifest.files.values()), default=0))
        )
        self.held = ("", -1, 0)
        """the chunk that the buffer holds: its file, its number, its bytes"""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """DCP's own metadata, made anew from the manifest."""
        known: dict[str, Any] = {}
        for name, record in self.tensors.items():
            blocks = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in record.regions]
            properties = TensorProperties(dtype=getattr(torch, record.dtype))
            known[name] = TensorStorageMetadata(properties, torch.Size(record.shape), blocks)
        return Metadata(known)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Piece after piece as they lie in the files, so that each chunk is read and verified once."""
        for piece, item in sorted(
            ((self._piece(item), item) for item in plan.items), key=lambda pair: file_position(pair[0])
        ):
            target = planner.resolve_tensor(item).detach()
            if prod(piece.shape):
                block = self._block(piece, self.tensors[item.storage_index.fqn].dtype)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    block = block.narrow(dim, start, length)
                target.copy_(block)
            planner.commit_tensor(item, target)
            self.progress()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, item: ReadItem) -> TensorRegion:
        return self.regions[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    def _block(self, piece: TensorRegion, dtype: str) -> torch.Tensor:
        index, begin = divmod(piece.start, self.manifest.chunk)
        raw: bytearray | memoryview = self._verified(piece.file, index)[begin : begin + piece.length]
        if len(raw) < piece.length:  # it goes on in the next chunks
            raw = bytearray(raw)
            while len(raw) < piece.length:
                index += 1
                raw += self._verified(piece.file, index)[: piece.length - len(raw)]
        return torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(piece.shape)

    def _verified(self, file: str, index: int) -> memoryview:
        """A chunk, read into memory and verified there; what is copied is what was verified."""
        if self.held[:2] != (file, index):
            self.held = ("", -1, 0)
            size, state, filled = self.manifest.chunk, xxhash.xxh3_128(), 0
            path, expected = f"{self.entry.folder}/{file}", self.manifest.files[file].chunks[index]
            while filled < size:  # in steps that stay in the processor's cache between their reading and their digest
                content = self.entry.store.read(path, index * size + filled, min(IO_BLOCK_BYTES, size - filled))
                self.buffer[filled : filled + len(content)] = content
                state.update(content)
                filled += len(content)
                if len(content) < IO_BLOCK_BYTES:
                    break
            if (found := state.hexdigest()) != expected:
                what = f"{self.entry.name} changed while it was read: {file} chunk {index}"
                raise CheckpointError(f"{what}: expected {expected}, found {found}")
            self.held = (file, index, filled)
        return memoryview(self.buffer)[: self.held[2]]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


def file_position(piece: TensorRegion) -> tuple[str, int]:
    return piece.file, piece.start


class PlannerShard:
    """A block as DCP's planners want to see it: they ask for items and chunks by these names."""

    def __init__(self, block: LocalShard) -> None:
        self.block = block
        self.chunk = ChunkStorageMetadata(torch.Size(block.offset), block.local.shape)

    def size(self) -> torch.Size:
        return torch.Size(self.block.shape)

    def __create_write_items__(self, name: str, _held: PlannerShard) -> list[WriteItem]:
        if not self.block.local.numel() and self.size().numel():
            return []  # more ranks than rows: this one has nothing of it
        data = TensorWriteData(self.chunk, TensorProperties.create_from_tensor(self.block.local), self.size())
        return [WriteItem(MetadataIndex(name, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk] if self.block.local.numel() or not self.size().numel() else []


class LocalShardSavePlanner(DefaultSavePlanner):
    """DCP's planner over `Held` blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].block.local


class LocalShardLoadPlanner(DefaultLoadPlanner):
    """DCP's planner over `Held` blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Without looking for tensors on the meta device: DCP drops what it does not know on the way."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].block.local  # type: ignore[no-any-return]


def as_planner_state(state: Mapping[str, torch.Tensor | LocalShard]) -> dict[str, Any]:
    return {name: PlannerShard(local_shard(tensor)) for name, tensor in state.items()}


def find_mismatches(state: CheckpointState, tensors: dict[str, TensorRecord]) -> list[str]:
    """How what a rank holds differs from a checkpoint: DCP would ignore, cast or fail halfway."""
    found = [f"{name} is missing in the checkpoint" for name in sorted(state.keys() - tensors.keys())]
    for name in sorted(state.keys() & tensors.keys()):
        block = local_shard(state[name])
        here, there = (dtype_name(block.local), block.shape), (tensors[name].dtype, tensors[name].shape)
        if here != there:
            found.append(f"{name} is {there[0]} {list(there[1])} in the checkpoint and {here[0]} {list(here[1])} here")
    return found
