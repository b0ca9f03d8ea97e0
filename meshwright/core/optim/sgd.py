"""SGD with momentum: torch's own, on local shards."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.core.optim.torch_rule import TorchRule


class SGD(TorchRule):
    """torch's SGD; it is elementwise. A momentum that begins with zeros equals torch's, which begins with the first
    gradient.
    """

    def make_optimizer(self, groups: list[dict[str, Any]], kernels: dict[str, bool]) -> torch.optim.Optimizer:
        config = self.config
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov and config.momentum > 0, **kernels
        )
        if config.momentum:
            for parameter in (p.local for p in self.parameters):
                optimizer.state[parameter] = {
                    "momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)
                }
        return optimizer
