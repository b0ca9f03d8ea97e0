"""Weights for a model on the meta device, made module by module, each rank its own blocks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from meshwright.parallel.local_shard import LocalShard, local_shard
from meshwright.parallel.parallel_spec import parameter_owners

Fill = Callable[[LocalShard, str], None]
"""Writes into a block what a parameter or buffer of this name holds there."""


class Materializer:
    """Memory for modules one by one (`ready`), then what it holds (`fill`), once each rank has its own rows alone."""

    def __init__(self, model: nn.Module, fill: Fill | None, device: torch.device) -> None:
        self.model, self.fill_shard, self.device = model, fill, device
        self.copied_from: dict[str, str] = {}
        """parameters that begin with what another one holds"""

    def allocate(self, module: nn.Module) -> None:
        made: dict[int, nn.Parameter] = {}
        for owner, name, parameter in parameter_owners(module):
            if parameter.is_meta:
                if id(parameter) not in made:  # a shared parameter stays shared
                    real = torch.empty_like(parameter, device=self.device)
                    made[id(parameter)] = nn.Parameter(real, parameter.requires_grad)
                owner._parameters[name] = made[id(parameter)]
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    owner._buffers[name] = torch.empty_like(buffer, device=self.device)

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """A module of the model, under the names of the whole."""
        if self.fill_shard is not None:
            names = {id(tensor): name for name, tensor in named_tensors(self.model)}
            for _, tensor in named_tensors(module):
                name = names[id(tensor)]
                self.fill_shard(local_shard(tensor), self.copied_from.get(name, name))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
