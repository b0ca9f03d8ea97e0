"""Whether ranks that should hold the same parameters do: digests compared, the odd one named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from meshwright.errors import MeshwrightError, PeerError
from meshwright.parallel.local_shard import LocalShard
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout


class ReplicaError(MeshwrightError):
    """A replica holds other parameters than the rest: a silent fault of memory, of a kernel or of a link."""


class ReplicaChecker:
    """Which blocks are held by more than one rank, and by whom: those are compared, kind by kind of cut."""

    def __init__(self, blocks: Mapping[str, LocalShard], layout: Layout) -> None:
        self.layout = layout
        shared = {
            cut for cut in {block.sharded_axes for block in blocks.values()} if len(layout.replica_group(0, cut)) > 1
        }
        held = {name: block.sharded_axes for name, block in blocks.items() if block.sharded_axes in shared}
        self.shardings = sorted(set(held.values()), key=sorted)
        self.names = sorted(held, key=lambda name: self.shardings.index(held[name]))
        """of everything compared, one kind of cut after the other"""
        self.name_indices = [[i for i, name in enumerate(self.names) if held[name] == cut] for cut in self.shardings]

    def digests(self, words: Tensor) -> list[int]:
        """One number for each kind of cut, from the words of `names`."""
        return [combine_checksums(words[span]) for span in self.name_indices]

    def find_mismatch(self, rows: Sequence[Sequence[int]]) -> ReplicaMismatch | None:
        """The first group of holders that disagree, from every rank's `digests`."""
        for kind, cut in enumerate(self.shardings):
            for group in self.layout.replica_groups(cut):
                if strange := minority_indices([rows[rank][kind] for rank in group]):
                    return ReplicaMismatch([group[i] for i in strange], group, kind)
        return None


@dataclass(frozen=True)
class ReplicaMismatch:
    ranks: list[int]
    group: list[int]
    sharding_index: int

    def error(self, rank: int, step: int, parameter: str = "") -> MeshwrightError:
        return replica_error(rank, step, self.ranks, len(self.group), parameter)


def compare_replicas(blocks: Mapping[str, LocalShard], layout: Layout, world: World, step: int) -> None:
    """Raises on every rank if holders of the same block differ, naming the odd rank and the first parameter."""
    replicas = ReplicaChecker(blocks, layout)
    words = parameter_checksums(blocks[name].local for name in replicas.names).cpu()
    odd = replicas.find_mismatch(world.all_gather_ints(*replicas.digests(words), name="replica digests"))
    if odd is not None:
        most = max(row[0] for row in world.all_gather_ints(len(words), name="replica names"))  # stages have not as many
        rows = world.all_gather_ints(*words.tolist(), *[0] * (most - len(words)), name="replica words")
        span = replicas.name_indices[odd.sharding_index]
        differing = next((i for i in span if len({rows[rank][i] for rank in odd.group}) > 1), 0)
        known = replicas.names[differing] if world.rank in odd.group else ""
        raise odd.error(world.rank, step, known.removeprefix("model/").removeprefix("buffer/"))


def parameter_checksums(parameters: Iterable[Tensor]) -> Tensor:
    """A word of each parameter; on a device the work is only queued."""
    words = [parameter_checksum(parameter) for parameter in parameters]
    return torch.stack(words) if words else torch.zeros(0, dtype=torch.int64)


def combine_checksums(words: Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(words.numpy().tobytes())) - 2**63


def parameter_checksum(parameter: Tensor) -> Tensor:
    """One integer of a parameter's bits, computed where it lies. One flipped bit always changes it; on a device it is a
    plain sum, which two errors may balance.
    """
    flat = parameter.detach().reshape(-1)
    if flat.device.type == "cpu":
        bits = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return torch.tensor(xxhash.xxh3_64_intdigest(bits) - 2**63)
    return flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()]).sum(
        dtype=torch.int64
    )


def minority_indices(digests: Sequence[int]) -> list[int]:
    """The ranks outside the majority; all of them where there is none; nobody where all agree."""
    counts = Counter(digests).most_common()
    if len(counts) == 1:
        return []
    if counts[0][1] * 2 <= len(digests):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest != counts[0][0]]


def replica_error(rank: int, step: int, odd: list[int], size: int, parameter: str) -> MeshwrightError:
    """The odd rank is to blame; the others are witnesses. Two replicas cannot tell which of them is right."""
    who = f"rank {odd[0]} differs from" if len(odd) < size else "all differ among"
    where = f", first in {parameter}" if parameter else ""
    what = f"step {step}: replicas hold different parameters: {who} the {size} replicas{where}"
    if rank in odd:
        return ReplicaError(what, "look for faulty memory or a faulty device on that rank")
    return PeerError(what)
