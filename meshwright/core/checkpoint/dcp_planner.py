"""DCP's planners over local shards: DCP decides which rank writes or reads which region of which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.base.checkpoint.format.regions import TensorRecord
from meshwright.core.checkpoint.state import CheckpointState, dtype_name
from meshwright.core.parallel.local_shard import LocalShard, local_shard


class PlannerShard:
    """A local shard with the methods that DCP's planners call on a sharded tensor."""

    def __init__(self, shard: LocalShard) -> None:
        self.shard = shard
        self.chunk = ChunkStorageMetadata(torch.Size(shard.offset), shard.local.shape)

    def size(self) -> torch.Size:
        return torch.Size(self.shard.shape)

    def __create_write_items__(self, name: str, _tensor: PlannerShard) -> list[WriteItem]:
        if not self.shard.local.numel() and self.size().numel():
            return []  # with more ranks than rows, this rank has no element
        data = TensorWriteData(self.chunk, TensorProperties.create_from_tensor(self.shard.local), self.size())
        return [WriteItem(MetadataIndex(name, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk] if self.shard.local.numel() or not self.size().numel() else []


class LocalShardSavePlanner(DefaultSavePlanner):
    """DCP's save planner over `PlannerShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].shard.local


class LocalShardLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner over `PlannerShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Skip DCP's search for tensors on the meta device, which drops values of types that it does not know."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].shard.local  # type: ignore[no-any-return]


def as_planner_state(state: Mapping[str, torch.Tensor | LocalShard]) -> dict[str, Any]:
    return {name: PlannerShard(local_shard(tensor)) for name, tensor in state.items()}


def find_mismatches(state: CheckpointState, tensors: dict[str, TensorRecord]) -> list[str]:
    """The differences in names, dtypes and shapes between the state of a rank and a checkpoint, which DCP would
    ignore, cast, or fail on halfway.
    """
    mismatches = [f"{name} is missing in the checkpoint" for name in sorted(state.keys() - tensors.keys())]
    for name in sorted(state.keys() & tensors.keys()):
        shard, record = local_shard(state[name]), tensors[name]
        dtype = dtype_name(shard.local)
        if (dtype, shard.shape) != (record.dtype, record.shape):
            mismatches.append(
                f"{name} is {record.dtype} {list(record.shape)} in the checkpoint "
                f"and {dtype} {list(shard.shape)} in the model"
            )
    return mismatches
