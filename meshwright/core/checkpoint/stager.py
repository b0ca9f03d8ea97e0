"""Stages a checkpoint: copies the shards that this rank saves to host memory, so that training can continue."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate
from math import prod

import torch

from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.host_memory import CopyStream, HostMemory
from meshwright.core.checkpoint.state import CheckpointState
from meshwright.core.checkpoint.verify import DIGEST_THREADS
from meshwright.core.parallel.data_parallel.replica_check import ReplicaChecker, parameter_checksums
from meshwright.core.parallel.local_shard import LocalShard, local_shard

ALIGNMENT = 64
"""The alignment in bytes of every tensor in host memory."""
CHECK_ELEMENTS = 1 << 24
"""Elements that a thread checks at once."""


class HostStager:
    """Host copies of the shards that this rank saves, in memory that is allocated once and reused.

    On CUDA the copies run beside the next forward and backward pass; `block_update` makes the next update wait.
    """

    def __init__(self, state: CheckpointState, layout: Layout, rank: int, stream: CopyStream | None = None) -> None:
        shards = {name: local_shard(tensor) for name, tensor in state.items()}
        device = next((shard.local.device for shard in shards.values() if shard.local.is_cuda), None)
        self.stream = stream or (CopyStream(device) if device is not None else None)
        names = assign_shards(shards, layout, rank)
        *starts, size = accumulate((aligned(shards[name].local.nbytes) for name in names), initial=0)
        self.memory = HostMemory(size, device)
        self.host = {
            name: shards[name].with_local(view_as(self.memory.bytes[start:], shards[name].local))
            for name, start in zip(names, starts, strict=True)
        }
        self.updated = names_written_by_update(state)
        self.replicas = ReplicaChecker({name: s for name, s in shards.items() if is_replica_checked(name)}, layout)
        self.checksums = torch.zeros(len(self.replicas.names), dtype=torch.int64, pin_memory=device is not None)
        """A checksum of every replicated parameter, whether this rank saves it or not: replicas are compared by it."""
        self.sources: list[torch.Tensor] = []
        """The tensors that are being copied: their memory is not reused meanwhile."""
        self.blocks_update = False
        """Whether the next update has to wait for copies."""

    def ready(self) -> bool:
        """Whether `copy` begins at once."""
        return self.memory.ready()

    @torch.no_grad()
    def copy(self, state: CheckpointState) -> dict[str, LocalShard]:
        """Copy to the host. On CUDA the copies are queued, and `wait` returns when they are complete."""
        self.memory.wait()
        sources = {name: local_shard(state[name]).local for name in self.host}
        if self.replicas.names:
            checksums = parameter_checksums(local_shard(state[name]).local for name in self.replicas.names)
            self.checksums.copy_(checksums, non_blocking=True)
        for name in self.host.keys() - self.updated:
            self.host[name].local.copy_(sources[name], non_blocking=True)
        with self.stream.copies() if self.stream else nullcontext():
            for name in self.host.keys() & self.updated:
                self.host[name].local.copy_(sources[name], non_blocking=True)
        if self.stream:
            self.sources, self.blocks_update = list(sources.values()), True
        return self.host

    def block_update(self) -> None:
        """Make the update that follows on the device wait for the copies; the host does not wait."""
        if self.stream and self.blocks_update:
            self.stream.block_current()
            self.blocks_update = False

    def blocked_seconds(self) -> float:
        """How long the last copies have blocked an update."""
        return self.stream.blocked_seconds() if self.stream and not self.blocks_update else 0.0

    def wait(self) -> None:
        """Wait for the copies."""
        if self.stream:
            self.stream.synchronize()
            self.sources = []


def aligned(size: int) -> int:
    """A size in bytes, rounded up so that the next tensor begins at the start of a cache line."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def view_as(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The first bytes of host memory, as a tensor of the dtype and shape of another."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def names_written_by_update(state: CheckpointState) -> set[str]:
    """The tensors that only the update of the optimizer writes: optimizer state, and parameters that have some. A
    forward pass may write any other one, such as a buffer of BatchNorm.
    """
    moments = {name for name in state if name.startswith("optimizer/")}
    return moments | {"model/" + name.removeprefix("optimizer/").rpartition("/")[0] for name in moments}


def is_replica_checked(name: str) -> bool:
    """Parameters and router biases are compared across replicas; other buffers differ until the next broadcast."""
    return name.startswith("model/") or name.endswith("router.bias")


def assign_shards(shards: Mapping[str, LocalShard], layout: Layout, rank: int) -> list[str]:
    """The names of the shards that this rank saves.

    Of the ranks with the same shard one saves it. Shards are assigned largest first, each to the rank with the fewest
    bytes so far; every rank computes the same assignment.
    """
    assigned = []
    groups = {axes: layout.replica_group(rank, axes) for axes in {shard.sharded_axes for shard in shards.values()}}
    loads = {axes: [0] * len(group) for axes, group in groups.items()}
    sizes = {name: prod(shard.shape) * shard.local.element_size() for name, shard in shards.items()}
    for name in sorted(shards, key=lambda name: (-sizes[name], name)):
        group, load = groups[shards[name].sharded_axes], loads[shards[name].sharded_axes]
        # Buffers (of BatchNorm) differ between replicas until rank 0 broadcasts its own: those of rank 0 are saved.
        index = 0 if name.startswith("buffer/") else load.index(min(load))
        load[index] += sizes[name]
        if group[index] == rank:
            assigned.append(name)
    return assigned


def first_nonfinite(tensors: Mapping[str, torch.Tensor]) -> str:
    """The name of the first tensor that may not be saved, or ''. Several threads read host memory several times as fast
    as one, and nothing is written before.
    """
    with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="finite") as threads:
        parts = [
            (name, threads.submit(is_finite, part))
            for name, tensor in tensors.items()
            if is_checked_for_finite(name, tensor)
            for part in tensor.reshape(-1).split(CHECK_ELEMENTS)
        ]
        return next((name for name, finite in parts if not finite.result()), "")


def is_checked_for_finite(name: str, tensor: torch.Tensor) -> bool:
    """A buffer may have any value."""
    return not name.startswith("buffer/") and tensor.is_floating_point() and tensor.numel() > 0


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, which are tested only if their sum is not finite."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
