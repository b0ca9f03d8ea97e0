"""Allocates and initializes a model that was built on the meta device, module by module, only local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.parallel.local_shard import LocalShard, local_shard
from meshwright.core.parallel.parallel_spec import parameter_owners
from meshwright.core.torch_private import BatchNormBase, is_fake, reset_sharded_parameters

Fill = Callable[[LocalShard, str], None]
"""Writes the initial values of the parameter or buffer of this name into a local shard."""


class RoundedParameter(NamedTuple):
    """A parameter in a lower precision."""

    weight: nn.Parameter
    master: Tensor
    """its float32 value"""


class Materializer:
    """Allocates modules one by one (`allocate`) and writes their values (`initialize`) once they are sharded."""

    def __init__(
        self, model: nn.Module, fill: Fill | None, device: torch.device, weights: torch.dtype = torch.float32
    ) -> None:
        self.model, self.fill_shard, self.device = model, fill, device
        has_statistics = any(isinstance(module, BatchNormBase) for module in model.modules())
        self.weights = torch.float32 if has_statistics else weights
        """the dtype of trained weights; beside the running statistics of BatchNorm, which are float32, they are, too"""
        self.masters: dict[nn.Parameter, Tensor] = {}
        """parameter of the model -> the float32 master weight that it is the rounding of"""
        self.copied_from: dict[str, str] = {}
        """parameters that start with the values of another parameter"""

    def allocate(self, module: nn.Module) -> None:
        """Replaces meta parameters and buffers by empty ones on the device."""
        allocated: dict[int, nn.Parameter] = {}
        for owner, name, parameter in parameter_owners(module):
            if parameter.is_meta:
                if id(parameter) not in allocated:  # a shared parameter stays shared
                    empty = torch.empty_like(parameter, device=self.device)
                    allocated[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                owner._parameters[name] = allocated[id(parameter)]
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    owner._buffers[name] = torch.empty_like(buffer, device=self.device)

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Initializes the local shards of a submodule, by their names in the full model, and rounds its weights."""
        names = {id(tensor): name for name, tensor in named_tensors(self.model)}
        if self.fill_shard is not None:
            for _, tensor in named_tensors(module):
                name = names[id(tensor)]
                self.fill_shard(local_shard(tensor), self.copied_from.get(name, name))
        copies = {p for p in module.parameters() if names.get(id(p)) in self.copied_from}
        rounded = round_parameters(module, self.weights)
        self.masters |= {new: master for old, (new, master) in rounded.items() if old not in copies}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def round_parameters(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, RoundedParameter]:
    """Rounds the float32 parameters that require a gradient to a dtype, and returns what became of each. Frozen
    parameters have no update that a rounding could lose, and autocast rounds them where they are used.

    A parameter keeps its identity, as in `nn.Module.to`: a user's module may refer to it elsewhere, and it may have
    hooks. A DTensor is FSDP2's or tensor parallelism's own, and a fake tensor has no storage to exchange; both are
    replaced.
    """
    rounded: dict[nn.Parameter, RoundedParameter] = {}
    if dtype == torch.float32:
        return rounded
    for owner, name, parameter in parameter_owners(module):
        if parameter.requires_grad and parameter.dtype == torch.float32 and parameter not in rounded:
            master = parameter.detach()
            if isinstance(parameter, DTensor) or is_fake(parameter):
                rounded[parameter] = RoundedParameter(nn.Parameter(master.to(dtype)), master)
            else:
                rounded[parameter] = RoundedParameter(parameter, master)
                parameter.data = master.to(dtype)
        if parameter in rounded:  # a shared parameter stays shared
            owner._parameters[name] = rounded[parameter].weight
    reset_sharded_parameters(module)
    return rounded
