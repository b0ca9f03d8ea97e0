"""The digest of frozen parameters, which a checkpoint refers to and does not contain; the same on every layout.

Every element is hashed with its position and the name of its parameter, and the hashes are summed modulo 2^64. So each
rank hashes its own shards, and one all-reduce of a number combines them. It detects other weights; it is no defence
against weights that were made to collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.base.config import RunConfig
from meshwright.base.models.lora import FACTORS
from meshwright.base.topology.layout import Layout
from meshwright.core.parallel.local_shard import LocalShard, local_shard
from meshwright.core.parallel.world import World

ELEMENTS = 1 << 22
"""Elements that are hashed at once."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd constants of splitmix64 and of xxHash."""


def separate_frozen(
    parameters: Mapping[str, Tensor], config: RunConfig, layout: Layout, world: World
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters that a checkpoint contains, and its reference to the others: the base of low-rank adaptation. A
    model without factors has all of its parameters in the checkpoint; of one with factors it has the factors, those of
    frozen groups, too. Every rank must call it.
    """
    if not config.lora.enabled:
        return dict(parameters), {}
    saved = {name: parameter for name, parameter in parameters.items() if name.endswith(FACTORS)}
    frozen = {name: parameter for name, parameter in parameters.items() if name not in saved}
    return saved, {"digest": frozen_digest(frozen, layout, world), "weights": describe_base(config)}


def describe_base(config: RunConfig) -> str:
    """Where a run reads its frozen parameters."""
    return f"init_from = {config.init_from}" if config.init_from else f"the initialization of seed {config.seed}"


@torch.no_grad()
def frozen_digest(frozen: Mapping[str, Tensor], layout: Layout, world: World) -> str:
    """One digest of the frozen parameters of all ranks. Every rank must call it."""
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    for name, tensor in frozen.items():
        shard = local_shard(tensor)
        if layout.replica_group(world.rank, shard.sharded_axes)[0] == world.rank:
            total += hash_shard(name, shard).to(total.device)
    if world.size > 1:
        total = world.all_reduce(total, "digest of frozen parameters").wait()
    return f"{int(total) & (1 << 64) - 1:016x}"


def hash_shard(name: str, shard: LocalShard) -> Tensor:
    """The sum of the hashes of a shard's elements."""
    key = hashlib.sha256(f"{name} {shard.local.dtype} {shard.shape}".encode()).digest()
    seed = int.from_bytes(key[:8], "little", signed=True)
    total = torch.zeros((), dtype=torch.int64, device=shard.local.device)
    if not shard.local.numel():
        return total
    bits = shard.local.contiguous().view(INTEGERS[shard.local.element_size()])
    bits = bits.reshape(1) if not bits.ndim else bits
    offset, shape = shard.offset or (0,), shard.shape or (1,)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    columns = torch.zeros((), dtype=torch.int64, device=bits.device)
    for dim in range(1, bits.ndim):
        index = torch.arange(offset[dim], offset[dim] + bits.shape[dim], device=bits.device) * strides[dim]
        columns = columns[..., None] + index
    rows = max(1, ELEMENTS // max(1, bits[0].numel()))
    for start in range(0, len(bits), rows):
        part = bits[start : start + rows].to(torch.int64)
        first = torch.arange(offset[0] + start, offset[0] + start + len(part), device=bits.device) * strides[0]
        positions = first.view(-1, *(1,) * (part.ndim - 1)) + columns
        total += mix(part ^ mix(positions ^ seed)).sum()
    return total


def mix(values: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which every bit of the input changes about half of those of the output."""
    for shift, multiplier in zip((30, 27, 31), MULTIPLIERS, strict=True):
        values = (values ^ (values >> shift)) * multiplier
    return values ^ (values >> 32)
