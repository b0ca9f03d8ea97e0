"""An update rule that is an optimizer of torch with fused or foreach kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.optim.interface import OptimizedParameter, UpdateRule
from meshwright.core.parallel.world import World


class TorchRule(UpdateRule):
    """Updates by an optimizer of torch, which a subclass makes in `make_optimizer`."""

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, config, layout, world, group)
        self.fused = config.implementation == "fused"
        groups = self.groups()
        self.lr_factors = [lr_factor for lr_factor, _ in groups]
        self.optimizer = self.make_optimizer(
            [
                {"params": [p.local for p in members], "weight_decay": weight_decay}
                for (_, weight_decay), members in groups.items()
            ],
            {"fused": True} if self.fused else {"foreach": True},
        )
        self.state = self.optimizer.state

    @abstractmethod
    def make_optimizer(self, groups: list[dict[str, Any]], kernels: dict[str, bool]) -> torch.optim.Optimizer:
        """The optimizer of torch for these parameter groups, with the arguments that choose its kernels."""

    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        for group, lr_factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True):
            group["lr"] = lr * lr_factor
        if self.fused:
            # The fused kernels take both as device scalars: no extra pass for clipping, no synchronization on `finite`.
            self.optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
            self.optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
            if divisor.dtype == torch.float64:  # the kernels accept a float32 scale only
                self.divide_gradients(divisor)
                self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif self.is_finite(finite):
            self.divide_gradients(divisor)
            self.optimizer.step()
