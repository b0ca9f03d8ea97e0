"""AdamW with global-norm clipping folded into its update, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from meshwright.config import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate that step (0-based) of so many uses."""
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    start = max(schedule.warmup, steps - round(schedule.decay * steps)) if schedule.kind == "wsd" else schedule.warmup
    done = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1 - done
    return peak * (schedule.floor + (1 - schedule.floor) * shape)


class Optimizer:
    """`update` scales, clips and steps in one pass over the gradients; a gradient that is not finite changes
    nothing.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.clip = config.clip
        self.fused = config.implementation == "fused"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.ndim >= 2]
        vectors = [p for p in self.parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            **({"fused": True} if self.fused else {"foreach": True}),
        )
        for parameter in self.parameters:  # what AdamW makes at its first step: a checkpoint always has a place to go
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def gradient_norm(self) -> Tensor:
        """The norm over all parameters, of gradients that are already the sum over ranks."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, foreach=True)

    def update(self, lr: float, norm: Tensor, scale: Tensor, finite: Tensor) -> None:
        """One step. `norm` is that of the true gradient; the stored one is `scale` times it."""
        divisor = scale * torch.clamp(norm / self.clip, min=1.0) if self.clip else scale * torch.ones_like(norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.fused:
            # The fused kernels take both as device scalars: no pass of its own for clipping, no wait for `finite`.
            self.adamw.grad_scale = divisor.float()  # type: ignore[attr-defined]
            self.adamw.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
            self.adamw.step()
        elif bool(finite):
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], 1.0 / divisor)
            self.adamw.step()

    def zero(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
