"""Compares parameters that several ranks hold by checksums, and names the rank that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from meshwright.base.topology.layout import Layout
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.world import World
from meshwright.errors import MeshwrightError, PeerError


class ReplicaError(MeshwrightError):
    """Raised on a rank whose parameters differ from those of its replicas: a silent error of memory, a kernel or a
    link.
    """


class ReplicaChecker:
    """Finds the local shards that several ranks hold, grouped by the axes that shard them, and compares them."""

    def __init__(self, shards: Mapping[str, LocalShard], layout: Layout) -> None:
        self.layout = layout
        shardings = {shard.sharded_axes for shard in shards.values()}
        replicated = {axes for axes in shardings if len(layout.replica_group(0, axes)) > 1}
        compared = {name: shard.sharded_axes for name, shard in shards.items() if shard.sharded_axes in replicated}
        self.shardings = sorted(set(compared.values()), key=sorted)
        """the sets of sharded axes that are compared"""
        self.names = sorted(compared, key=lambda name: self.shardings.index(compared[name]))
        """the names of all compared shards, in the order of `shardings`"""
        self.name_indices = [
            [index for index, name in enumerate(self.names) if compared[name] == axes] for axes in self.shardings
        ]

    def digests(self, checksums: Tensor) -> list[int]:
        """One digest per sharding, from the checksums of `names`."""
        return [combine_checksums(checksums[indices]) for indices in self.name_indices]

    def find_mismatch(self, digests_by_rank: Sequence[Sequence[int]]) -> ReplicaMismatch | None:
        """The first group of replicas whose digests differ."""
        for index, axes in enumerate(self.shardings):
            for group in self.layout.replica_groups(axes):
                if minority := minority_indices([digests_by_rank[rank][index] for rank in group]):
                    return ReplicaMismatch([group[i] for i in minority], group, index)
        return None


@dataclass(frozen=True)
class ReplicaMismatch:
    """A group of replicas that differ."""

    ranks: list[int]
    """the ranks outside of the majority, or all ranks if there is no majority"""
    group: list[int]
    sharding_index: int
    """the index in `ReplicaChecker.shardings`"""

    def error(self, rank: int, step: int, parameter: str = "") -> MeshwrightError:
        return replica_error(rank, step, self.ranks, len(self.group), parameter)


def compare_replicas(shards: Mapping[str, LocalShard], layout: Layout, world: World, step: int) -> None:
    """Raises on every rank if replicas differ, and names the differing rank and the first differing parameter."""
    checker = ReplicaChecker(shards, layout)
    checksums = parameter_checksums(shards[name].local for name in checker.names).cpu()
    mismatch = checker.find_mismatch(world.all_gather_ints(*checker.digests(checksums), name="replica digests"))
    if mismatch is None:
        return
    # Pipeline stages have different numbers of parameters: rows are padded to the longest.
    longest = max(row[0] for row in world.all_gather_ints(len(checksums), name="replica parameter counts"))
    padding = [0] * (longest - len(checksums))
    rows = world.all_gather_ints(*checksums.tolist(), *padding, name="replica checksums")
    indices = checker.name_indices[mismatch.sharding_index]
    differing = next((i for i in indices if len({rows[rank][i] for rank in mismatch.group}) > 1), 0)
    parameter = checker.names[differing] if world.rank in mismatch.group else ""
    raise mismatch.error(world.rank, step, parameter.removeprefix("model/").removeprefix("buffer/"))


def parameter_checksums(parameters: Iterable[Tensor]) -> Tensor:
    """One checksum per parameter; on a device the work is queued, and the host does not wait."""
    checksums = [parameter_checksum(parameter) for parameter in parameters]
    return torch.stack(checksums) if checksums else torch.zeros(0, dtype=torch.int64)


def combine_checksums(checksums: Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(checksums.numpy().tobytes())) - 2**63


def parameter_checksum(parameter: Tensor) -> Tensor:
    """An integer of the bits of a parameter, computed on its device. A single flipped bit always changes it; on CUDA it
    is a sum of integers, in which two errors may cancel.
    """
    flat = parameter.detach().reshape(-1)
    if flat.device.type == "cpu":
        bits = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return torch.tensor(xxhash.xxh3_64_intdigest(bits) - 2**63)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()]
    return flat.view(integer).sum(dtype=torch.int64)


def minority_indices(digests: Sequence[int]) -> list[int]:
    """The indices outside of the majority; all if there is no majority; none if all digests are equal."""
    counts = Counter(digests).most_common()
    if len(counts) == 1:
        return []
    if counts[0][1] * 2 <= len(digests):
        return list(range(len(digests)))
    return [index for index, digest in enumerate(digests) if digest != counts[0][0]]


def replica_error(rank: int, step: int, minority: list[int], size: int, parameter: str) -> MeshwrightError:
    """A ReplicaError on the differing ranks, a PeerError on the others. Of two replicas, both are reported: it is
    unknown which one is wrong.
    """
    who = f"rank {minority[0]} differs from" if len(minority) < size else "all differ among"
    where = f", first in {parameter}" if parameter else ""
    what = f"step {step}: replicas hold different parameters: {who} the {size} replicas{where}"
    if rank in minority:
        return ReplicaError(what, "try to find the faulty memory or device of that rank")
    return PeerError(what)
