"""Stages a checkpoint: copies the shards that this rank saves to host memory, so that training can continue."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from meshwright.checkpoint.state import CheckpointState
from meshwright.parallel.data_parallel.replica_check import ReplicaChecker, parameter_checksums
from meshwright.parallel.local_shard import LocalShard, local_shard
from meshwright.topology.layout import Layout


class HostStager:
    """Host copies of the shards that this rank saves, in buffers that are allocated once and reused."""

    def __init__(self, state: CheckpointState, layout: Layout, rank: int) -> None:
        shards = {name: local_shard(tensor) for name, tensor in state.items()}
        pinned = any(shard.local.is_cuda for shard in shards.values())
        self.host = {
            name: shards[name].with_local(
                torch.zeros(shards[name].local.shape, dtype=shards[name].local.dtype, pin_memory=pinned)
            )
            for name in assign_shards(shards, layout, rank)
        }
        self.replicas = ReplicaChecker({name: s for name, s in shards.items() if is_replica_checked(name)}, layout)
        self.checksums = torch.zeros(len(self.replicas.names), dtype=torch.int64, pin_memory=pinned)
        """A checksum of every replicated parameter, whether this rank saves it or not: replicas are compared by it."""
        self.copy_begin, self.copy_end = (torch.cuda.Event(enable_timing=True) if pinned else None for _ in range(2))

    @torch.no_grad()
    def copy(self, state: CheckpointState) -> dict[str, LocalShard]:
        """Copy to the host. On CUDA the copies are enqueued before the next step, and `wait` returns when they are
        complete.
        """
        if self.copy_begin is not None:
            self.copy_begin.record()
        for name, host in self.host.items():
            host.local.copy_(local_shard(state[name]).local, non_blocking=True)
        if self.replicas.names:
            checksums = parameter_checksums(local_shard(state[name]).local for name in self.replicas.names)
            self.checksums.copy_(checksums, non_blocking=True)
        if self.copy_end is not None:
            self.copy_end.record()
        return self.host

    def wait(self) -> float:
        """Wait for the copies; the seconds of device time that they took."""
        if self.copy_begin is None or self.copy_end is None:
            return 0.0
        self.copy_end.synchronize()
        return float(self.copy_begin.elapsed_time(self.copy_end)) / 1e3


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


def is_finite(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor may be saved; a buffer may have any value. Elements are tested only if the sum is not finite."""
    if name.startswith("buffer/") or not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
