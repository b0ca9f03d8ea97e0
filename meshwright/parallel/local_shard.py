"""The block of a tensor that this rank holds: its data, where it sits in the whole, and who holds the same."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# It advises against gathering along two axes one after the other, which is what `whole_of` is for.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass(frozen=True)
class LocalShard:
    local: Tensor
    shape: tuple[int, ...]
    """of the whole"""
    offset: tuple[int, ...]
    sharded_axes: frozenset[str] = frozenset()
    """the axes along which ranks hold different blocks; along every other axis they hold the same"""

    def with_local(self, local: Tensor) -> LocalShard:
        """Another tensor that is cut as this one is, such as an optimizer's moment."""
        return LocalShard(local, self.shape, self.offset, self.sharded_axes)


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory of this rank's part; a plain tensor is all of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_shard(tensor: Tensor | LocalShard) -> LocalShard:
    """A matrix is cut for the tensor axis first and what is left of it for the shard axis: from the innermost out."""
    if isinstance(tensor, LocalShard):
        return tensor
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), shape, (0,) * len(shape))
    mesh, offset, size, cut = tensor.device_mesh, [0] * len(shape), list(shape), set()
    names = mesh.mesh_dim_names or ()
    for index in reversed(range(mesh.ndim)):
        placement = tensor.placements[index]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(f"a tensor of {shape} is still a sum to be made over {names[index]}")
        dim: int = placement.dim  # type: ignore[attr-defined]
        each = -(-size[dim] // mesh.size(index))
        start = min(each * mesh.get_local_rank(index), size[dim])
        offset[dim] += start
        size[dim] = min(each, size[dim] - start)
        if mesh.size(index) > 1:
            cut.update(names[index].split("+"))  # axes that share one dimension of a mesh
    local = local_tensor(tensor)
    if tuple(local.shape) != tuple(size):
        raise ValueError(f"a block of {tuple(local.shape)} lies where one of {tuple(size)} of {shape} should")
    return LocalShard(local, shape, tuple(offset), frozenset(cut))


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank of its mesh; they must all ask."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
