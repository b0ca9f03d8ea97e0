"""Who is where: the axes of the mesh, their order and degrees, and which ranks form which group.

Torch-free: everything that speaks of ranks asks here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from meshwright.config import LayoutConfig, RunConfig
from meshwright.topology import schedules

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outermost first: neighbours in rank are neighbours on the last axis, so the chattiest axis has the fastest links."""

DATA_AXES = ("replicate", "shard")
"""The axes along which ranks read different samples."""


@dataclass(frozen=True)
class Layout:
    """A degree for every axis; ranks are numbered in row-major order over AXES. `expert` has no ranks of its own: it
    folds over neighbours among those that see different tokens and share parameters (`folded`).
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def from_config(cls, config: LayoutConfig) -> Layout:
        """Sharding without a degree of its own divides the replicas, and makes no copies."""
        apart = config.shard == "none" or config.shard_degree is not None
        return cls(
            pipeline=config.pipeline,
            replicate=config.replicate if apart else 1,
            shard=(config.shard_degree or 1) if apart else config.replicate,
            context=config.context,
            tensor=config.tensor,
            expert=config.expert,
        )

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return prod(self.degrees)

    @property
    def data_degree(self) -> int:
        """How many ways the global batch is split."""
        return prod(getattr(self, axis) for axis in DATA_AXES)

    @property
    def active_mesh_axes(self) -> tuple[str, ...]:
        """The axes that more than one rank stands on."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    @property
    def expert_axes(self) -> tuple[str, str]:
        """The axes over which experts are spread: shards where there are any, else copies, and pieces of sequences."""
        return ("shard" if self.shard > 1 else "replicate", "context")

    @property
    def expert_axes_size(self) -> int:
        return prod(getattr(self, axis) for axis in self.expert_axes)

    @property
    def active_axes(self) -> tuple[str, ...]:
        """Those in use, with the one that has no ranks of its own."""
        return (*self.active_mesh_axes, "expert") if self.expert > 1 else self.active_mesh_axes

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis; where experts are spread, also among those that share experts, and which
        of the groups of these it is in (expert_shard).
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of {self.ranks}")
        place = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, place[axis] = divmod(rank, degree)
        if self.expert > 1:
            first, second = self.expert_axes
            among = place[first] * getattr(self, second) + place[second]
            place["expert_shard"], place["expert"] = divmod(among, self.expert)
        return place

    def replica_group(self, rank: int, cut: Collection[str]) -> list[int]:
        """The ranks that hold the same block as this one of what is cut along these axes. No stage of a pipeline holds
        anything of another.
        """
        place = self.coordinates(rank)
        near = self.group(rank, *(axis for axis in AXES if axis != "pipeline" and axis not in cut))
        return [other for other in near if all(self.coordinates(other)[axis] == place[axis] for axis in cut)]

    def replica_groups(self, cut: Collection[str]) -> list[list[int]]:
        """Every group of ranks that hold the same block."""
        return _holders(self, tuple(sorted(cut)))

    def data_coordinate(self, rank: int) -> int:
        """Which slice of the global batch a rank reads."""
        place, index = self.coordinates(rank), 0
        for axis in DATA_AXES:
            index = index * getattr(self, axis) + place[axis]
        return index

    def reader_rank(self, data_coordinate: int) -> int:
        """The first of the ranks that read a slice of the global batch."""
        rank = 0
        for axis in reversed(DATA_AXES):
            data_coordinate, place = divmod(data_coordinate, getattr(self, axis))
            rank += place * self.stride(axis)
        return rank

    def stride(self, axis: str) -> int:
        """How far apart in rank neighbours on an axis are."""
        return prod(self.degrees[AXES.index(axis) + 1 :])

    def counts_tokens(self, rank: int) -> bool:
        """Whether a rank is the one of those that compute the same loss whose loss and tokens count."""
        return self.is_first_on(rank, (axis for axis in AXES if axis not in DATA_AXES))

    def is_first_on(self, rank: int, axes: Iterable[str]) -> bool:
        """Whether a rank stands at the beginning of all these axes: the one of its likes that counts."""
        place = self.coordinates(rank)
        return all(place[axis] == 0 for axis in axes)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from this one on these axes alone, in order."""
        if axes == ("expert",):
            return self._expert_group(rank)
        place = self.coordinates(rank)
        members = [rank - sum(place[axis] * self.stride(axis) for axis in axes)]
        for axis in axes:
            steps = range(0, getattr(self, axis) * self.stride(axis), self.stride(axis))
            members = [member + step for member in members for step in steps]
        return sorted(members)

    def groups(self, *axes: str) -> Iterator[list[int]]:
        """Every group of an axis, or of several together, in the order of their first ranks."""
        return (group for rank in range(self.ranks) if (group := self.group(rank, *axes))[0] == rank)

    def _expert_group(self, rank: int) -> list[int]:
        """Experts are spread over so many neighbours."""
        peers = self.group(rank, *self.expert_axes)
        start = peers.index(rank) // self.expert * self.expert
        return peers[start : start + self.expert]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in self.active_axes) or "replicate 1"


@cache
def _holders(layout: Layout, cut: tuple[str, ...]) -> list[list[int]]:
    """Worked out once: copies are compared by it again and again."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        groups.setdefault(tuple(place[axis] for axis in ("pipeline", *cut)), []).append(rank)
    return list(groups.values())


def stages_per_rank(config: RunConfig) -> int:
    """Stages of a pipeline on every rank."""
    return config.pipeline.stages or schedules.default_stages(config.pipeline.schedule)
