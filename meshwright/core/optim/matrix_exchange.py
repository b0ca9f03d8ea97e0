"""Applies a function to whole matrices, each on its owner: shards travel to the owners, and the results back.

A bucket of matrices takes two all-to-alls. The first is left out where every owner has its matrices in full, as with
replicas. The function sees the same matrices on every layout, so the results depend on it by rounding
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.matrix_owners import (
    BUCKET_ELEMENTS,
    Bucket,
    Matrix,
    MatrixOwners,
    OwnedMatrix,
    Region,
    ShardedParameter,
    Sharding,
    region_numel,
)
from meshwright.core.optim.interface import OptimizedParameter
from meshwright.core.parallel.world import World

Route = tuple[int, OwnedMatrix, Region]
"""(the other rank, a matrix, the part of it that is sent or received)"""


class MatrixExchange:
    """The exchange of the matrices of one rank's parameters."""

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.world, self.group = world, group
        sharded = [ShardedParameter(p.name, p.shard.shape, sharding_of_tensor(p.parameter)) for p in parameters]
        owners = MatrixOwners(sharded, layout, world.rank, bucket_elements)
        self.ranks = owners.ranks
        self.buckets = [BucketRoutes.of_rank(world.rank, bucket) for bucket in owners.buckets]
        self.first_experts = {p.name: p.shard.offset[0] for p in parameters if len(p.shard.shape) == 3}
        """by parameter with the matrices of experts: the first expert of this rank's shard"""
        dtype = reduce(torch.promote_types, (p.local.dtype for p in parameters))
        self.empty = torch.empty(0, dtype=dtype, device=parameters[0].local.device)
        for parameter, optimized in zip(sharded, parameters, strict=True):
            shard, region = optimized.shard, parameter.region(layout, world.rank)
            found = tuple((start, start + size) for start, size in zip(shard.offset, shard.local.shape, strict=True))
            if region != found and (region_numel(region) or shard.local.numel()):
                raise ValueError(f"rank {world.rank} has the region {found} of {parameter.name}; expected {region}")

    @torch.no_grad()
    def map_matrices(self, tensors: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every matrix by a function of it, in place in its local shards. `tensors` are the local shards by
        parameter, of all parameters. The function maps a stack of matrices of one shape.
        """
        for routes in self.buckets:
            results = apply_by_shape(self._gather(routes, tensors), function)
            self._scatter(routes, results, tensors)

    def _gather(self, routes: BucketRoutes, tensors: Mapping[str, Tensor]) -> dict[Matrix, Tensor]:
        """The full matrices that this rank owns."""
        whole = {
            owned.matrix: self.empty.new_empty(owned.matrix.shape)
            if owned.is_gathered
            else self._local(owned.matrix, tensors).to(self.empty.dtype)
            for owned in routes.owned
        }
        if routes.gathers:
            pieces = [self._local(owned.matrix, tensors) for _, owned, _ in routes.to_owners]
            received = self._exchange("gather", pieces, routes.to_owners, routes.at_owner)
            for (_, owned, part), values in zip(routes.at_owner, received, strict=True):
                whole[owned.matrix][slices(part)] = values
        return whole

    def _scatter(self, routes: BucketRoutes, results: Mapping[Matrix, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copies the results of all owners into the local shards."""
        pieces = [results[owned.matrix][slices(part)] for _, owned, part in routes.from_owner]
        received = self._exchange("scatter", pieces, routes.from_owner, routes.results)
        for (_, owned, _), values in zip(routes.results, received, strict=True):
            self._local(owned.matrix, tensors).copy_(values)

    def _exchange(
        self, name: str, pieces: Sequence[Tensor], sent: Sequence[Route], received: Sequence[Route]
    ) -> list[Tensor]:
        """Sends each piece along its route, and returns the received pieces."""
        if self.group is None:
            return list(pieces)
        values = torch.cat([self.empty, *(piece.reshape(-1).to(self.empty.dtype) for piece in pieces)])
        sizes = [region_numel(part) for _, _, part in received]
        output = self.empty.new_empty(sum(sizes))
        heartbeat = self.world.heartbeat
        heartbeat.collective(f"{name} of matrices")
        heartbeat.set_waiting(True)
        dist.all_to_all_single(output, values, self._splits(received), self._splits(sent), group=self.group)
        heartbeat.set_waiting(False)
        shapes = [[end - start for start, end in part] for _, _, part in received]
        return [piece.view(shape) for piece, shape in zip(output.split(sizes), shapes, strict=False)]

    def _splits(self, routes: Sequence[Route]) -> list[int]:
        """The number of elements per rank of the group."""
        elements = dict.fromkeys(self.ranks, 0)
        for other, _, part in routes:
            elements[other] += region_numel(part)
        return list(elements.values())

    def _local(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of a matrix, a view of its local shard."""
        name = matrix.parameter.name
        return tensors[name] if matrix.expert is None else tensors[name][matrix.expert - self.first_experts[name]]


@dataclass(frozen=True)
class BucketRoutes:
    """What one rank sends and receives for a bucket, in the order of ranks and then of matrices."""

    gathers: bool
    """whether any owner needs the parts of other ranks"""
    owned: list[OwnedMatrix]
    """the matrices that this rank owns"""
    to_owners: list[Route]
    at_owner: list[Route]
    """what this rank receives as an owner"""
    from_owner: list[Route]
    results: list[Route]
    """what this rank receives of the results"""

    @classmethod
    def of_rank(cls, rank: int, bucket: Bucket) -> BucketRoutes:
        gathered = [owned for owned in bucket if owned.is_gathered]
        return cls(
            bool(gathered),
            [owned for owned in bucket if owned.owner == rank],
            ordered((o.owner, o, part) for o in gathered for sender, part in o.senders() if sender == rank),
            ordered((sender, o, part) for o in gathered if o.owner == rank for sender, part in o.senders()),
            ordered((other, o, part) for o in bucket if o.owner == rank for other, part in o.receivers()),
            ordered((o.owner, o, part) for o in bucket for other, part in o.receivers() if other == rank),
        )


def ordered(routes: Iterable[Route]) -> list[Route]:
    return sorted(routes, key=lambda route: (route[0], route[1].number))


def slices(part: Region) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in part)


def apply_by_shape(matrices: Mapping[Matrix, Tensor], function: Callable[[Tensor], Tensor]) -> dict[Matrix, Tensor]:
    """Applies a function to stacks of matrices of one shape."""
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    results: dict[Matrix, Tensor] = {}
    for members in by_shape.values():
        stacked = torch.stack([matrices[matrix] for matrix in members])
        results |= dict(zip(members, function(stacked).unbind(), strict=True))
    return results


def sharding_of_tensor(tensor: Tensor) -> Sharding:
    """How ranks divide a tensor: the innermost mesh dimension divides it first."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    return tuple(
        (names[index], tensor.placements[index].dim)  # type: ignore[attr-defined]
        for index in reversed(range(mesh.ndim))
        if not tensor.placements[index].is_replicate() and mesh.size(index) > 1
    )
