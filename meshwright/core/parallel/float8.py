"""Float8 for the linear layers inside blocks: forward and backward by meshwright/core/kernels/float8.py.

A layer keeps its name, its parameters and their dtypes. Its class changes, and that happens before tensor parallelism,
whose styles call the module's own forward on shards; each rank then has the scales of its own shard.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from meshwright.core.kernels.float8 import MULTIPLE, float8_linear
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks, find_modules
from meshwright.errors import ConfigError

CAPABILITY = (8, 9)
"""The first compute capability of CUDA whose tensor cores multiply float8."""


class Float8Linear(nn.Linear):
    """A linear layer whose products are computed in float8."""

    def forward(self, input: Tensor) -> Tensor:
        product = multiply(input, self.weight)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x, weight)` in float8, of local tensors or of DTensors that are sharded over one mesh dimension."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    x, weight = x.to(dtype), weight.to(dtype)
    if not isinstance(weight, DTensor):
        return float8_linear(x, weight)
    assert isinstance(x, DTensor)
    (placement,) = weight.placements
    local = float8_linear(
        x.to_local(grad_placements=[Partial() if placement.is_shard(0) else p for p in x.placements]), weight.to_local()
    )
    output = Shard(local.ndim - 1) if placement.is_shard(0) else Partial()
    return DTensor.from_local(local, weight.device_mesh, [output], run_check=False)


def linear(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The product of a layer's input with its weight, in the precision of the layer."""
    return multiply(x, weight) if isinstance(module, Float8Linear) else F.linear(x, weight)


def apply_float8(model: nn.Module, spec: ParallelSpec, tensor_degree: int) -> None:
    for module in find_linear_layers(model, spec, tensor_degree):
        module.__class__ = Float8Linear


def find_linear_layers(model: nn.Module, spec: ParallelSpec, tensor_degree: int) -> list[nn.Linear]:
    """The linear layers of all blocks, except for routers, layers with low-rank factors or other subclasses, and layers
    of which a dimension of a shard is not a multiple of 16.
    """
    routers = {id(child) for module in modules_with_experts(model, spec) for child in module.children()}
    modules = (module for block in find_blocks(model, spec) for module in block.modules())
    return [m for m in modules if type(m) is nn.Linear and id(m) not in routers and fits(m, tensor_degree)]


def fits(module: nn.Linear, tensor_degree: int) -> bool:
    return not any(size % (MULTIPLE * tensor_degree) for size in module.weight.shape)


def modules_with_experts(model: nn.Module, spec: ParallelSpec) -> list[nn.Module]:
    """The modules that contain experts. Linear layers directly inside of them choose or weight the experts."""
    return find_modules(model, spec.experts.rpartition(".")[0]) if spec.experts else []


def float8_layers(model: nn.Module) -> list[str]:
    """The layers that are computed in float8, those of all blocks under one name, such as `blocks.*.ffn.up`."""
    names = (name for name, module in model.named_modules() if isinstance(module, Float8Linear))
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))


def require_float8(device: torch.device) -> None:
    """Raises a ConfigError if a GPU has no float8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigError(
            f"precision.float8 = true needs a GPU of compute capability 8.9 or newer, and {device} has {found}",
            "try precision.float8 = false",
        )
