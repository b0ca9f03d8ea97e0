"""The layout of a run: the degree of every axis, the coordinates of every rank, and the groups of ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING

from meshwright.base.topology.axes import AXES, DATA_AXES
from meshwright.base.topology.schedules import find_schedule

if TYPE_CHECKING:
    from meshwright.base.config import LayoutConfig, RunConfig


@dataclass(frozen=True)
class Layout:
    """The degree of every axis. Ranks are numbered in row-major order over `AXES`.

    The expert axis has no ranks of its own: it reuses consecutive ranks of `expert_axes`, which process different
    tokens.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def from_config(cls, config: LayoutConfig) -> Layout:
        """Without `shard_degree`, sharding divides the model among the `replicate` ranks, and there are no replicas."""
        keeps_replicas = config.shard == "none" or config.shard_degree is not None
        return cls(
            pipeline=config.pipeline,
            replicate=config.replicate if keeps_replicas else 1,
            shard=(config.shard_degree or 1) if keeps_replicas else config.replicate,
            context=config.context,
            tensor=config.tensor,
            expert=config.expert,
        )

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The degrees of `AXES`: the shape of the mesh."""
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def ranks(self) -> int:
        return prod(self.degrees)

    @cached_property
    def data_degree(self) -> int:
        """The number of slices of the global batch."""
        return prod(getattr(self, axis) for axis in DATA_AXES)

    @cached_property
    def active_mesh_axes(self) -> tuple[str, ...]:
        """The axes of degree 2 or more that have ranks of their own."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    @property
    def active_axes(self) -> tuple[str, ...]:
        """The axes of degree 2 or more, the expert axis included."""
        return (*self.active_mesh_axes, "expert") if self.expert > 1 else self.active_mesh_axes

    @property
    def expert_axes(self) -> tuple[str, str]:
        """The axes whose ranks the expert axis reuses: shard (replicate if nothing is sharded) and context."""
        return ("shard" if self.shard > 1 else "replicate", "context")

    @property
    def expert_axes_size(self) -> int:
        return prod(getattr(self, axis) for axis in self.expert_axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis. With expert parallelism also `expert`, and `expert_shard`: the index
        of its expert group among those of `expert_axes`.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is outside of the layout's {self.ranks} ranks")
        coordinates = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, coordinates[axis] = divmod(rank, degree)
        if self.expert > 1:
            outer, inner = self.expert_axes
            index = coordinates[outer] * getattr(self, inner) + coordinates[inner]
            coordinates["expert_shard"], coordinates["expert"] = divmod(index, self.expert)
        return coordinates

    def replica_group(self, rank: int, sharded_axes: Collection[str]) -> list[int]:
        """The ranks that hold the same local shard as `rank` of a tensor that is sharded along these axes. Pipeline
        stages hold different tensors.
        """
        coordinates = self.coordinates(rank)
        candidates = self.group(rank, *(axis for axis in AXES if axis != "pipeline" and axis not in sharded_axes))
        return [
            other
            for other in candidates
            if all(self.coordinates(other)[axis] == coordinates[axis] for axis in sharded_axes)
        ]

    def replica_groups(self, sharded_axes: Collection[str]) -> list[list[int]]:
        """All groups of ranks that hold the same local shard of a tensor that is sharded along these axes."""
        return _replica_groups(self, tuple(sorted(sharded_axes)))

    def data_coordinate(self, rank: int) -> int:
        """The index of the slice of the global batch that a rank reads."""
        coordinates, index = self.coordinates(rank), 0
        for axis in DATA_AXES:
            index = index * getattr(self, axis) + coordinates[axis]
        return index

    def reader_rank(self, data_coordinate: int) -> int:
        """The first rank that reads a slice of the global batch."""
        rank = 0
        for axis in reversed(DATA_AXES):
            data_coordinate, coordinate = divmod(data_coordinate, getattr(self, axis))
            rank += coordinate * self.stride(axis)
        return rank

    def stride(self, axis: str) -> int:
        """The difference in rank between neighbours on an axis."""
        return prod(self.degrees[AXES.index(axis) + 1 :])

    def counts_tokens(self, rank: int) -> bool:
        """Whether a rank's tokens enter the global count. One rank per slice of the global batch counts them; the
        others read the same samples.
        """
        return self.is_first_on(rank, (axis for axis in AXES if axis not in DATA_AXES))

    def is_first_on(self, rank: int, axes: Iterable[str]) -> bool:
        """Whether a rank has coordinate 0 on all of these axes."""
        coordinates = self.coordinates(rank)
        return all(coordinates[axis] == 0 for axis in axes)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` on these axes only, in order."""
        if axes == ("expert",):
            return self._expert_group(rank)
        coordinates = self.coordinates(rank)
        members = [rank - sum(coordinates[axis] * self.stride(axis) for axis in axes)]
        for axis in axes:
            offsets = range(0, getattr(self, axis) * self.stride(axis), self.stride(axis))
            members = [member + offset for member in members for offset in offsets]
        return sorted(members)

    def groups(self, *axes: str) -> Iterator[list[int]]:
        """All groups of an axis, or of several axes together, in the order of their first ranks."""
        return (group for rank in range(self.ranks) if (group := self.group(rank, *axes))[0] == rank)

    def _expert_group(self, rank: int) -> list[int]:
        """The `expert` consecutive ranks among which the experts are divided."""
        peers = self.group(rank, *self.expert_axes)
        start = peers.index(rank) // self.expert * self.expert
        return peers[start : start + self.expert]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in self.active_axes) or "replicate 1"


@cache
def _replica_groups(layout: Layout, sharded_axes: tuple[str, ...]) -> list[list[int]]:
    """Cached, since replicas are compared repeatedly."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.ranks):
        coordinates = layout.coordinates(rank)
        groups.setdefault(tuple(coordinates[axis] for axis in ("pipeline", *sharded_axes)), []).append(rank)
    return list(groups.values())


def stages_per_rank(config: RunConfig) -> int:
    """The pipeline stages of every rank: `pipeline.stages`, or the default of the schedule."""
    return config.pipeline.stages or find_schedule(config.pipeline.schedule).default_stages
