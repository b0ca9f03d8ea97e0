"""AdamW on master weights: updates them and the weights of the model in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.kernels.adamw import AdamWSettings, MasterTensors
from meshwright.core.optim.interface import OptimizedParameter, UpdateRule
from meshwright.core.parallel.world import World


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
        steps = torch.zeros(len(parameters), device=parameters[0].local.device)
        for index, local in enumerate(p.local for p in parameters):
            self.state[local] = {
                "step": steps[index],
                "exp_avg": torch.zeros_like(local, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(local, requires_grad=False),
            }
        self.tensors = MasterTensors(
            [p.local.detach() for p in parameters],
            [p.local.detach() if p.weight is None else p.weight for p in parameters],
            [self.state[p.local]["exp_avg"] for p in parameters],
            [self.state[p.local]["exp_avg_sq"] for p in parameters],
            steps,
            [p.settings.lr_factor for p in parameters],
            [p.settings.weight_decay for p in parameters],
        )

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        settings = AdamWSettings(lr, (self.config.beta1, self.config.beta2), self.config.eps)
        self.tensors.update([p.local.grad for p in self.parameters], settings, divisor, finite)
