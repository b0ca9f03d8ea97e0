"""Muon: the momentum of every matrix is orthogonalized by Newton-Schulz iterations (Keller Jordan, 2024).

The momentum is updated on local shards. Whole matrices are then orthogonalized, each by its owner, and every rank
updates its own shards. Embedding, head and vectors are updated by AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.optim.interface import OptimizedParameter, UpdateRule
from meshwright.core.optim.matrix_exchange import MatrixExchange
from meshwright.core.parallel.world import World

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic polynomial, chosen for its slope at zero: singular values come close to 1, between 0.7 and 1.2."""
MIN_NORM = 1e-7
"""The smallest norm that a matrix is divided by."""


class Muon(UpdateRule):
    """Updates matrices by their orthogonalized momentum."""

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, config, layout, world, group)
        self.state = {p.local: {"momentum": torch.zeros_like(p.local)} for p in parameters}
        self.exchange = MatrixExchange(parameters, layout, world, group)

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        if not self.is_finite(finite):
            return
        self.divide_gradients(divisor)
        directions = {p.name: self._direction(p) for p in self.parameters}
        self.exchange.map_matrices(directions, partial(orthogonalize, steps=self.config.newton_schulz_steps))
        for parameter in (p for p in self.parameters if p.local.grad is not None):
            settings, local = parameter.settings, parameter.local
            rate = lr * settings.lr_factor
            local.mul_(1 - rate * settings.weight_decay)
            scale = update_scale(self.config.update_scale, parameter.shard.shape)
            local.add_(directions[parameter.name], alpha=-rate * scale)

    def _direction(self, parameter: OptimizedParameter) -> Tensor:
        """Updates the momentum, and returns what is orthogonalized. With Nesterov momentum it overwrites the gradient,
        which is not needed any more. Without a gradient it is zero, so that the messages of all ranks
        have the same sizes.
        """
        gradient, momentum = parameter.local.grad, self.state[parameter.local]["momentum"]
        if gradient is None:
            return torch.zeros_like(parameter.local)
        momentum.lerp_(gradient, 1 - self.config.momentum)
        return gradient.lerp_(momentum, self.config.momentum) if self.config.nesterov else gradient.copy_(momentum)


def update_scale(kind: str, shape: tuple[int, ...]) -> float:
    """The factor of an orthogonalized matrix. `match-rms-adamw` gives updates the root mean square of those of AdamW,
    so that both have the same learning rate (arXiv:2502.16982); `original` is that of the author of Muon.
    """
    rows, columns = shape[-2:]
    return 0.2 * sqrt(max(rows, columns)) if kind == "match-rms-adamw" else sqrt(max(1.0, rows / columns))


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximates U V^T of the singular value decomposition U S V^T of every matrix of a stack."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
