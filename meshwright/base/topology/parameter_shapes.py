"""The shape of a parameter with its FSDP unit and tensor-parallel dimension, and how FSDP2 shards it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol


def fsdp_shard_dim(shape: tuple[int, ...], shards: int) -> int:
    """The dimension that FSDP2 shards: the first, unless there are fewer experts than shards, which would leave some
    ranks without a shard. FSDP2 shards other dimensions than the first only evenly.
    """
    return 1 if len(shape) == 3 and shape[0] < shards and shape[1] % shards == 0 else 0


def padded_numel(shape: tuple[int, ...], shards: int) -> int:
    """The elements of the unsharded parameter with FSDP2's padding, which fills rows up to a multiple of `shards`."""
    sharded_size = shape[fsdp_shard_dim(shape, shards)]
    return prod(shape) // sharded_size * (-(-sharded_size // shards) * shards)


def shard_shape(shape: tuple[int, ...], shards: int, shard_index: int) -> tuple[int, ...]:
    """The shape of one rank's shard, without padding."""
    dim = fsdp_shard_dim(shape, shards)
    chunk = -(-shape[dim] // shards)
    return (*shape[:dim], max(0, min(chunk, shape[dim] - chunk * shard_index)), *shape[dim + 1 :])


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the full model."""

    name: str
    shape: tuple[int, ...]
    unit: str
    """the FSDP unit: the name of a block, `before` or `after` for the modules around the blocks, or `root`"""
    tp_dim: int | None = None
    """the dimension that tensor parallelism shards; None: replicated on all tensor-parallel ranks"""
    is_expert_weight: bool = False
    """whether its first dimension is that of the experts, which expert parallelism shards"""
    trainable: bool = True
    """whether it requires a gradient; a frozen parameter has no gradient and no optimizer state"""

    def local_shape(self, tensor: int, expert: int = 1) -> tuple[int, ...]:
        """The shape on one rank after tensor and expert parallelism, before FSDP2."""
        local = tuple(size // tensor if dim == self.tp_dim else size for dim, size in enumerate(self.shape))
        return (local[0] // expert, *local[1:]) if self.is_expert_weight else local

    def local_numel(self, tensor: int = 1, expert: int = 1) -> int:
        return prod(self.local_shape(tensor, expert))


class ModelShape(Protocol):
    """What placement needs to know of a model."""

    @property
    def parameters(self) -> Sequence[ParameterShape]:
        """every parameter once, in model order"""

    @property
    def untied_parameters(self) -> Sequence[ParameterShape]:
        """the parameters of a pipeline, in which a tied weight has a copy of its own"""

    @property
    def tied(self) -> Mapping[str, str]:
        """tied weights: copy -> owner"""

    @property
    def block_names(self) -> tuple[str, ...]:
        """the names of the blocks, which are those of their FSDP units"""

    def block_costs(self, sequence: int) -> tuple[float, ...]:
        """the work of every block, those of the first and the last with the modules around the blocks"""
