"""Expert load balancing across steps: the auxiliary loss weight, and router biases updated from the global load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.base.config import RunConfig
from meshwright.core.models.layers.experts import Experts, update_router_bias
from meshwright.core.parallel.world import World


class ExpertBalancer:
    """Balances the experts of this rank's blocks. Loads are summed over the data-parallel ranks, so that biases move
    identically on every layout.
    """

    def __init__(self, module: nn.Module, config: RunConfig, world: World) -> None:
        self.world = world
        self.shape = (config.model.layers, config.model.experts + 1)
        self.rate = 0.0 if config.lora.enabled else config.model.router_bias_rate  # the base is frozen
        self.weight = config.model.router_aux_loss / config.batch.global_
        named = ((name, m) for name, m in module.named_modules() if isinstance(m, Experts))
        self.layers = {block_index(name): experts for name, experts in named}

    def begin_step(self, scale: Tensor, dtype: torch.dtype) -> None:
        """Sets the weight of the auxiliary loss before the forward passes; `scale` is the loss scale."""
        pull = scale.to(dtype) * self.weight if self.weight else None
        for experts in self.layers.values():
            experts.auxiliary_scale = pull

    def discard_loads(self) -> None:
        """Forgets the loads of passes that belong to no step."""
        for experts in self.layers.values():
            experts.take_load()

    @torch.no_grad()
    def update_biases(self, finite: Tensor) -> Tensor | None:
        """Updates the biases after a step, unless it is skipped, and returns the loads, one row per block: the tokens
        that chose each expert, then the number of dropped tokens. Returns None for a model without experts.
        """
        if self.shape[1] == 1:
            return None
        loads = torch.zeros(self.shape, dtype=torch.int64, device=self.world.device)
        for block, experts in self.layers.items():
            load, dropped = experts.take_load()
            loads[block, :-1], loads[block, -1] = load, dropped
        loads = self.world.all_reduce(loads, "expert loads").wait()
        for block, experts in self.layers.items():
            if not experts.router.routing.updates_bias:
                continue
            bias = experts.router.bias
            bias.copy_(torch.where(finite, update_router_bias(bias, loads[block, :-1], self.rate), bias))
        return loads


def block_index(name: str) -> int:
    """Returns 3 for `decoder.blocks.3.ffn`."""
    return int(name.split(".")[-2])


def imbalance(loads: Tensor) -> float:
    """Returns the largest load of an expert as a multiple of an even share, in the worst block."""
    tokens = loads[:, :-1].double()
    return round(float((tokens.amax(dim=1) / tokens.mean(dim=1).clamp(min=1)).max()), 4)
