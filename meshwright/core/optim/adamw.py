"""AdamW: torch's own, on local shards."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.core.optim.torch_rule import TorchRule


class AdamW(TorchRule):
    """torch's AdamW; it is elementwise, so no shard needs another."""

    def make_optimizer(self, groups: list[dict[str, Any]], kernels: dict[str, bool]) -> torch.optim.Optimizer:
        config = self.config
        betas = (config.beta1, config.beta2)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **kernels)
        for parameter in (p.local for p in self.parameters):  # AdamW creates its state lazily
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        return optimizer
