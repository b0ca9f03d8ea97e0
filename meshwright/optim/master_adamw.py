"""AdamW on master weights: updates them and the weights of the model in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config import OptimizerConfig
from meshwright.kernels.adamw import AdamWTensors, adamw_update
from meshwright.optim.interface import OptimizedParameter, UpdateRule
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout
from meshwright.torch_private import foreach_add_


class MasterAdamW(UpdateRule):
    """AdamW of parameters with master weights, with the state of torch's AdamW."""

    rounds_masters = True

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, config, layout, world, group)
        for local in (p.local for p in parameters):
            self.state[local] = {
                "step": torch.zeros((), device=local.device),
                "exp_avg": torch.zeros_like(local, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(local, requires_grad=False),
            }

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        updates = []
        for parameter in self.parameters:
            local, settings = parameter.local, parameter.settings
            if local.grad is not None:
                weight = local if parameter.weight is None else parameter.weight
                rate, decay = lr * settings.lr_factor, settings.weight_decay
                updates.append(
                    AdamWTensors(local, weight, local.grad, lr=rate, weight_decay=decay, **self.state[local])
                )
        if updates:
            foreach_add_([update.step for update in updates], finite.float())
            adamw_update(updates, (self.config.beta1, self.config.beta2), self.config.eps, divisor, finite)
