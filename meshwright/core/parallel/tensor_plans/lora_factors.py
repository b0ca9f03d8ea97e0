"""Tensor parallelism of low-rank factors: one factor is sharded like its weight, the other one is replicated.

| weight | A | B | product |
|---|---|---|---|
| sharded by rows (colwise) | replicated | sharded by rows | the local columns of the output |
| sharded by columns (rowwise) | sharded by columns | replicated | a partial sum, reduced with that of the weight |
| replicated | replicated | replicated | that of the rank's own tokens |

So the factors add no collective to forward. In backward, the gradient of the replicated factor is a partial sum over
tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from meshwright.base.models.lora import FACTORS
from meshwright.core.models.layers.lora_linear import LoraLinear
from meshwright.core.parallel.expert_parallel import local_weight


def parallelize_with_factors(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Applies a style without communication. A style knows nothing of factors, so they are left out of it, and some
    styles of torch forget that a parameter is frozen.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    factors = {name: module._parameters.pop(name) for name in FACTORS} if isinstance(module, LoraLinear) else {}
    parallelize_module(module, mesh, style, src_data_rank=None)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    if isinstance(module, LoraLinear):
        shard_factors(module, mesh, factors)


def shard_factors(module: LoraLinear, mesh: DeviceMesh, factors: dict[str, nn.Parameter | None]) -> None:
    weight = module.weight
    assert isinstance(weight, DTensor)
    placement = weight.placements[0]
    sharded: dict[str, Placement] = {}
    if placement.is_shard():
        sharded = {"lora_a": Shard(1)} if placement.is_shard(1) else {"lora_b": Shard(0)}
    for name, factor in factors.items():
        assert factor is not None
        distributed = distribute_tensor(factor, mesh, [sharded.get(name, Replicate())], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, factor.requires_grad))
    output = {"lora_a": Partial(), "lora_b": Shard(-1)}[next(iter(sharded))] if sharded else None
    module.low_rank = partial(low_rank_of_shards, module, mesh, output)  # type: ignore[method-assign]


def low_rank_of_shards(module: LoraLinear, mesh: DeviceMesh, output: Placement | None, x: Tensor) -> Tensor:
    """The product of the factors as a DTensor. Every rank has all features of `x` and a part of its gradient (colwise),
    or a part of the features (rowwise); with a replicated weight, its own tokens (`output` is None).
    """
    assert isinstance(x, DTensor)
    local = x.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in x.placements])
    return DTensor.from_local(local_low_rank(module, local), mesh, [output or x.placements[0]], run_check=False)


def local_low_rank(module: LoraLinear, x: Tensor) -> Tensor:
    """The product of the local factors with a local tensor."""
    return F.linear(F.linear(x, local_weight(module, "lora_a")) * module.scale, local_weight(module, "lora_b"))


def with_low_rank(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    """The local output of a style that multiplies local tensors itself, with the product of the factors, if any."""
    return output + local_low_rank(module, x) if isinstance(module, LoraLinear) else output
