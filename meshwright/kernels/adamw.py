"""AdamW on float32 master weights whose rounding is the weight of the model, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.kernels.triton_runtime import runs_triton
from meshwright.torch_private import fused_adamw_

BLOCK = 1024
"""Elements that one program of the kernel updates."""


@dataclass(frozen=True)
class AdamWTensors:
    """What the update of one parameter reads and writes; all are contiguous and of one shape, except for `step`."""

    master: Tensor
    weight: Tensor
    """the master rounded to the dtype of the weights in the model"""
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """a float32 scalar: the number of updates of the parameter, this one included"""
    lr: float
    weight_decay: float


def adamw_torch(
    updates: Sequence[AdamWTensors], betas: tuple[float, float], eps: float, divisor: Tensor, finite: Tensor
) -> None:
    """Divides the gradients by `divisor` and updates once; if not `finite`, nothing changes. By torch's fused kernel on
    one float32 gradient after the other, and a copy to the weight.
    """
    divisor, found_inf = divisor.float(), 1.0 - finite.float()
    for update in updates:
        fused_adamw_(
            [update.master],
            [update.gradient.to(update.master.dtype, copy=True)],  # the kernel divides it in place
            [update.exp_avg],
            [update.exp_avg_sq],
            [],
            [update.step],
            lr=update.lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=update.weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )
        update.weight.copy_(update.master)


def adamw_triton(
    updates: Sequence[AdamWTensors], betas: tuple[float, float], eps: float, divisor: Tensor, finite: Tensor
) -> None:
    """The same by one launch of a Triton kernel per parameter: 28 bytes of memory traffic per element where gradient
    and weight are bf16.
    """
    from meshwright.kernels.triton_adamw import adamw_kernel

    steps = torch.stack([update.step for update in updates]).double()
    corrections = torch.stack([1 - betas[0] ** steps, (1 - betas[1] ** steps).sqrt()], dim=1).float()
    scalars = torch.stack([divisor.float(), finite.float()])
    for index, update in enumerate(updates):
        if count := update.master.numel():
            adamw_kernel[(-(-count // BLOCK),)](
                update.master,
                update.weight,
                update.gradient,
                update.exp_avg,
                update.exp_avg_sq,
                corrections,
                scalars,
                index,
                count,
                update.lr,
                1 - update.lr * update.weight_decay,
                betas[0],
                betas[1],
                1 - betas[0],
                1 - betas[1],
                eps,
                BLOCK=BLOCK,
            )


def adamw_update(
    updates: Sequence[AdamWTensors], betas: tuple[float, float], eps: float, divisor: Tensor, finite: Tensor
) -> None:
    """Updates by the kernel that runs on the device. The host does not wait for `divisor` or `finite`."""
    if updates:
        update = adamw_triton if runs_triton(updates[0].master.device) else adamw_torch
        update(updates, betas, eps, divisor, finite)
