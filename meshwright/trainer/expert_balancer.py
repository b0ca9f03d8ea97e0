"""What keeps experts evenly loaded from step to step: the pull of the auxiliary loss, and biases by the load of all
ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.config import RunConfig
from meshwright.models.experts import Experts, update_router_bias
from meshwright.parallel.world import World


class ExpertBalancer:
    """The experts of this rank's blocks. Loads are summed over the ranks, which see different tokens, so that biases
    move alike on every layout.
    """

    def __init__(self, module: nn.Module, config: RunConfig, world: World) -> None:
        self.world = world
        self.shape = (config.model.layers, config.model.experts + 1)
        self.rate = config.model.router_bias_rate
        self.weight = config.model.router_aux_loss / config.batch.global_
        named = ((name, m) for name, m in module.named_modules() if isinstance(m, Experts))
        self.layers = {block_number(name): experts for name, experts in named}

    def begin(self, scale: Tensor, dtype: torch.dtype) -> None:
        """Before a step's forward passes; `scale` is the loss's own."""
        pull = scale.to(dtype) * self.weight if self.weight else None
        for experts in self.layers.values():
            experts.auxiliary_scale = pull

    def forget(self) -> None:
        """Passes that were no part of a step."""
        for experts in self.layers.values():
            experts.take_load()

    @torch.no_grad()
    def end(self, finite: Tensor) -> Tensor | None:
        """After a step, on every rank: moves the biases, unless the step is skipped, and gives the loads, one row a
        block: the tokens that chose each expert, then the visits that were dropped. None where there are no experts.
        """
        if self.shape[1] == 1:
            return None
        loads = torch.zeros(self.shape, dtype=torch.int64, device=self.world.device)
        for block, experts in self.layers.items():
            load, dropped = experts.take_load()
            loads[block, :-1], loads[block, -1] = load, dropped
        loads = self.world.all_reduce(loads, "expert loads").wait()
        for block, experts in self.layers.items():
            bias = experts.router.bias
            bias.copy_(torch.where(finite, update_router_bias(bias, loads[block, :-1], self.rate), bias))
        return loads


def block_number(name: str) -> int:
    """Of `decoder.blocks.3.ffn`, 3."""
    return int(name.split(".")[-2])


def imbalance(loads: Tensor) -> float:
    """The most loaded expert's tokens, as a multiple of an even share, of the worst block."""
    own = loads[:, :-1].double()
    return round(float((own.amax(dim=1) / own.mean(dim=1).clamp(min=1)).max()), 4)
