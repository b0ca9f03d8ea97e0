"""The shard of a tensor on this rank: its data, its offset in the full tensor, and the axes that shard it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# DTensor warns about gathering along two mesh dimensions in sequence, which is what `full_tensor` does.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass(frozen=True)
class LocalShard:
    """One rank's shard of a tensor."""

    local: Tensor
    shape: tuple[int, ...]
    """the shape of the full tensor"""
    offset: tuple[int, ...]
    """the position of the shard in the full tensor"""
    sharded_axes: frozenset[str] = frozenset()
    """the axes along which ranks have different shards; along all others they have equal ones"""

    def with_local(self, local: Tensor) -> LocalShard:
        """Another tensor that is sharded in the same way, such as an optimizer moment."""
        return LocalShard(local, self.shape, self.offset, self.sharded_axes)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself, detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_shard(tensor: Tensor | LocalShard) -> LocalShard:
    """The local shard of a tensor. A matrix is sharded by the innermost mesh dimension first (tensor), and its shards
    by the next one (shard).
    """
    if isinstance(tensor, LocalShard):
        return tensor
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), shape, (0,) * len(shape))
    mesh, offset, size = tensor.device_mesh, [0] * len(shape), list(shape)
    names, sharded_axes = mesh.mesh_dim_names or (), set()
    for index in reversed(range(mesh.ndim)):
        placement = tensor.placements[index]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(f"a tensor of shape {shape} is a partial sum over {names[index]}; expected a reduced one")
        dim: int = placement.dim  # type: ignore[attr-defined]
        chunk = -(-size[dim] // mesh.size(index))
        start = min(chunk * mesh.get_local_rank(index), size[dim])
        offset[dim] += start
        size[dim] = min(chunk, size[dim] - start)
        if mesh.size(index) > 1:
            sharded_axes.update(names[index].split("+"))  # a mesh dimension may combine two axes
    local = local_tensor(tensor)
    if tuple(local.shape) != tuple(size):
        raise ValueError(f"a shard of a tensor of {shape} has shape {tuple(local.shape)}; expected {tuple(size)}")
    return LocalShard(local, shape, tuple(offset), frozenset(sharded_axes))


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor on every rank of its mesh. It is a collective: all of them must call it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
