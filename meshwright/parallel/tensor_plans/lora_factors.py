"""Tensor parallelism of low-rank factors: one factor is sharded like its weight, the other one is replicated.

| weight | A | B | product |
|---|---|---|---|
| sharded by rows (colwise) | replicated | sharded by rows | the local columns of the output |
| sharded by columns (rowwise) | sharded by columns | replicated | a partial sum, reduced with that of the weight |

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

from meshwright.models.layers.lora_linear import LoraLinear
from meshwright.models.lora import FACTORS
from meshwright.parallel.expert_parallel import local_weight


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
    by_columns = weight.placements[0].is_shard(1)
    sharded: dict[str, Placement] = {"lora_a": Shard(1)} if by_columns else {"lora_b": Shard(0)}
    for name, factor in factors.items():
        assert factor is not None
        placement = sharded.get(name, Replicate())
        distributed = distribute_tensor(factor, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, factor.requires_grad))
    output: Placement = Partial() if by_columns else Shard(-1)
    module.low_rank = partial(local_low_rank, module, mesh, output)  # type: ignore[method-assign]


def local_low_rank(module: LoraLinear, mesh: DeviceMesh, output: Placement, x: Tensor) -> Tensor:
    """The product of the local factors. Every rank has all features of `x` (colwise), and a part of its gradient; or a
    part of the features (rowwise).
    """
    assert isinstance(x, DTensor)
    rows = x.to_local(
        grad_placements=[Partial() if placement.is_replicate() else placement for placement in x.placements]
    )
    hidden = F.linear(rows, local_weight(module, "lora_a")) * module.scale
    product = F.linear(hidden, local_weight(module, "lora_b"))
    return DTensor.from_local(product, mesh, [output], run_check=False)
