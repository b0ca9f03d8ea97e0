"""Divides whole matrices among the ranks that have parts of them: one owner per matrix, with equal work. Torch-free.

A whole-matrix optimizer sends the shards of a matrix to its owner, which computes on the full matrix and returns to
every rank its shard of the result. Matrices are exchanged in buckets. All ranks derive the same plan from the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshwright.base.topology.axes import AXES
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shapes import ParameterShape, fsdp_shard_dim
from meshwright.base.topology.parameter_shards import dense_shard_group, expert_shard_group, uses_fsdp

Region = tuple[tuple[int, int], ...]
"""(start, end) in every dimension."""
Sharding = tuple[tuple[str, int], ...]
"""(axis, dimension) of every division of a parameter, in the order in which they apply: tensor before shard."""

OPTIMIZER_AXIS = "optimizer"
"""The name, in communication volume, of the group of ranks that update the same parameters."""
BUCKET_ELEMENTS = 1 << 24
"""The elements of the matrices of a bucket, per rank: larger buckets need fewer collectives and more memory."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter whose last two dimensions are a matrix, and how ranks divide it."""

    name: str
    shape: tuple[int, ...]
    """(rows, columns), or (experts, rows, columns)"""
    sharding: Sharding = ()

    def region(self, layout: Layout, rank: int) -> Region:
        """The region of a rank's local shard."""
        bounds = [(0, size) for size in self.shape]
        for axis, dim in self.sharding:
            degree, index = axis_position(layout, rank, axis)
            start, end = bounds[dim]
            chunk = -(-(end - start) // degree)
            bounds[dim] = min(end, start + chunk * index), min(end, start + chunk * (index + 1))
        return tuple(bounds)


def axis_position(layout: Layout, rank: int, axis: str) -> tuple[int, int]:
    """(degree, coordinate of a rank) of a mesh dimension, which may combine two axes."""
    coordinates = layout.coordinates(rank)
    if axis == "expert_shard":
        return layout.expert_axes_size // layout.expert, coordinates[axis]
    degree, index = 1, 0
    for name in axis.split("+"):
        size = getattr(layout, name)
        degree, index = degree * size, index * size + coordinates[name]
    return degree, index


def sharding_of(parameter: ParameterShape, layout: Layout) -> Sharding:
    """How a layout divides a parameter of a model."""
    divisions = [("tensor", parameter.tp_dim)] if parameter.tp_dim is not None and layout.tensor > 1 else []
    divides_experts = parameter.is_expert_weight and layout.expert > 1
    divisions += [("expert", 0)] if divides_experts else []
    group = expert_shard_group(layout, 0) if divides_experts else dense_shard_group(layout, 0)
    if uses_fsdp(layout) and group.shards > 1:
        local = parameter.local_shape(layout.tensor, layout.expert)
        divisions.append((group.shard_axis, fsdp_shard_dim(local, group.shards)))
    return tuple((axis, dim) for axis, dim in divisions if dim is not None)


@dataclass(frozen=True)
class Matrix:
    """One whole matrix: a parameter, or one expert of a parameter that has the matrices of all experts."""

    parameter: ShardedParameter
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.parameter.shape[-2], self.parameter.shape[-1]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def work(self) -> int:
        """Proportional to the FLOPs of Newton-Schulz iterations."""
        return self.numel * min(self.shape)

    def part_of(self, region: Region) -> Region | None:
        """The part of the matrix in a region of the parameter; None if it has no element there."""
        if self.expert is not None:
            (start, end), *region = region  # type: ignore[assignment]
            if not start <= self.expert < end:
                return None
        return tuple(region) if all(start < end for start, end in region) else None


def region_numel(region: Region) -> int:
    return prod(end - start for start, end in region)


def matrices_of(parameters: Sequence[ShardedParameter]) -> Iterator[Matrix]:
    for parameter in parameters:
        if len(parameter.shape) == 2:
            yield Matrix(parameter)
        else:
            yield from (Matrix(parameter, expert) for expert in range(parameter.shape[0]))


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix with its owner, and the parts that ranks have of it."""

    matrix: Matrix
    owner: int
    holders: dict[Region, list[int]]
    """part -> the ranks that have it"""
    number: int

    @property
    def is_gathered(self) -> bool:
        """Whether the owner needs the parts of other ranks."""
        return self.owner not in self.holders.get(((0, self.matrix.shape[0]), (0, self.matrix.shape[1])), ())

    def senders(self) -> Iterator[tuple[int, Region]]:
        """The parts that are sent to the owner, each by one of the ranks that have it: the owner itself if it does."""
        for part, ranks in self.holders.items():
            yield self.owner if self.owner in ranks else ranks[self.number % len(ranks)], part

    def receivers(self) -> Iterator[tuple[int, Region]]:
        """The parts of the result that are sent to every rank that has one."""
        for part, ranks in self.holders.items():
            for rank in ranks:
                yield rank, part


Bucket = list[OwnedMatrix]


class MatrixOwners:
    """The owners of all matrices of a group of ranks: those of a pipeline rank, which have the same parameters."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        layout: Layout,
        rank: int = 0,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.layout, self.ranks = layout, layout.group(rank, *update_axes())
        self.matrices = list(matrices_of(parameters))
        self.bucket_elements = bucket_elements * len(self.ranks)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Consecutive matrices, each given to the rank with the least work so far; if several have the least, to the
        one that has the largest part of it.
        """
        work, regions = dict.fromkeys(self.ranks, 0), dict[ShardedParameter, list[tuple[int, Region]]]()
        buckets: list[Bucket] = []
        for members in self._divide():
            bucket: Bucket = []
            for number, matrix in sorted(members, key=lambda item: -item[1].work):
                parameter = matrix.parameter
                if parameter not in regions:
                    regions[parameter] = [(rank, parameter.region(self.layout, rank)) for rank in self.ranks]
                parts = {rank: p for rank, region in regions[parameter] if (p := matrix.part_of(region)) is not None}
                owner = min(parts, key=lambda rank: (work[rank], -region_numel(parts[rank]), rank))
                work[owner] += matrix.work
                holders: dict[Region, list[int]] = {}
                for rank, part in parts.items():
                    holders.setdefault(part, []).append(rank)
                bucket.append(OwnedMatrix(matrix, owner, holders, number))
            buckets.append(sorted(bucket, key=lambda owned: owned.number))
        return buckets

    def _divide(self) -> Iterator[list[tuple[int, Matrix]]]:
        """The matrices of every bucket with their numbers."""
        members: list[tuple[int, Matrix]] = []
        elements = 0
        for number, matrix in enumerate(self.matrices):
            if members and elements + matrix.numel > self.bucket_elements:
                yield members
                members, elements = [], 0
            members.append((number, matrix))
            elements += matrix.numel
        if members:
            yield members

    def sent_elements(self, rank: int) -> tuple[int, int]:
        """The elements that a rank sends per update, itself included: to owners, and as an owner."""
        to_owners = from_owner = 0
        for owned in (owned for bucket in self.buckets for owned in bucket):
            if owned.is_gathered:
                to_owners += sum(region_numel(part) for sender, part in owned.senders() if sender == rank)
            if owned.owner == rank:
                from_owner += sum(region_numel(part) for _, part in owned.receivers())
        return to_owners, from_owner

    def work_of(self, rank: int) -> int:
        return sum(owned.matrix.work for bucket in self.buckets for owned in bucket if owned.owner == rank)


def update_axes() -> tuple[str, ...]:
    """The axes of the ranks that update the same parameters: all but the pipeline axis."""
    return tuple(axis for axis in AXES if axis != "pipeline")
