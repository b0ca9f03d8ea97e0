"""Weights for a model on the meta device, made module by module, each rank its own blocks alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshwright.parallel.blocks import Block, block_of
from meshwright.parallel.parts import owned_parameters

Fill = Callable[[Block, str], None]
"""Writes into a block what a parameter of this name holds there."""


class Weights:
    """Call it with a module once its parameters have the form that they are to keep."""

    def __init__(self, model: nn.Module, fill: Fill | None, device: torch.device) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.fill, self.device = fill, device

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        made: dict[int, nn.Parameter] = {}
        for owner, name, parameter in owned_parameters(module):
            if not parameter.is_meta or self.fill is None:
                continue
            if id(parameter) not in made:  # a shared parameter stays shared
                real = nn.Parameter(torch.empty_like(parameter, device=self.device), parameter.requires_grad)
                self.fill(block_of(real), self.names[id(parameter)])
                made[id(parameter)] = real
            owner._parameters[name] = made[id(parameter)]
