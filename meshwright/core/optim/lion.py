"""Lion (Chen et al., 2023): the update is the sign of an interpolation of momentum and gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.optim.interface import OptimizedParameter, UpdateRule
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


class Lion(UpdateRule):
    """p <- (1 - lr decay) p - lr sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g."""

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, config, layout, world, group)
        self.grouped = self.groups()
        for parameter in (p.local for p in parameters):
            self.state[parameter] = {"exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        if not self.is_finite(finite):
            return
        self.divide_gradients(divisor)
        for (lr_factor, weight_decay), members in self.grouped.items():
            used = [p.local for p in members if p.local.grad is not None]
            if not used:
                continue
            rate = lr * lr_factor
            parameters: list[Tensor] = [p.data for p in used]
            gradients = [p.grad for p in used if p.grad is not None]
            averages = [self.state[p]["exp_avg"] for p in used]
            updates = list(foreach_lerp(averages, gradients, 1 - self.config.beta1))
            foreach_sign_(updates)
            foreach_mul_(parameters, 1 - rate * weight_decay)
            foreach_add_(parameters, updates, alpha=-rate)
            foreach_lerp_(averages, gradients, 1 - self.config.beta2)
