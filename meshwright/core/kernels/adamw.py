"""AdamW on float32 master weights whose rounding is the weight of the model, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshwright.core.kernels.triton_runtime import runs_triton
from meshwright.core.torch_private import fused_adamw_

BLOCK, WARPS = 1024, 8
"""Elements that one program of the kernel updates, and its warps: the fastest of 8 pairs on an H200."""


@dataclass(frozen=True)
class AdamWSettings:
    """What the host knows of an update."""

    lr: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class MasterTensors:
    """The tensors that AdamW updates, one of each list per parameter. Those of a parameter have the same strides and no
    gaps between elements.
    """

    masters: Sequence[Tensor]
    weights: Sequence[Tensor]
    """the masters rounded to the dtype of the weights in the model; a master itself where it is the weight"""
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Tensor
    """float32: the number of updates of every parameter"""
    lr_factors: Sequence[float]
    weight_decays: Sequence[float]

    def update(
        self, gradients: Sequence[Tensor | None], settings: AdamWSettings, divisor: Tensor, finite: Tensor
    ) -> None:
        """Divides the gradients by `divisor` and updates once; if not `finite`, nothing changes. A parameter without a
        gradient does not change. The host waits for no value on the device.
        """
        if not self.masters:
            return
        used = [gradient is not None for gradient in gradients]
        counted = finite if all(used) else host_to_device(torch.tensor(used), self.steps.device) & finite
        self.steps.add_(counted)
        gradients = [
            gradient if gradient is None or gradient.stride() == master.stride() else like(master, gradient)
            for gradient, master in zip(gradients, self.masters, strict=True)
        ]
        update = adamw_triton if runs_triton(self.steps.device) else adamw_torch
        update(self, gradients, settings, divisor, finite)

    @cached_property
    def addresses(self) -> Tensor:
        """(parameters, 4): where each parameter's master, weight and moments are on the device."""
        columns = zip(self.masters, self.weights, self.exp_avgs, self.exp_avg_sqs, strict=True)
        return torch.tensor([[tensor.data_ptr() for tensor in row] for row in columns]).to(self.steps.device)

    @cached_property
    def is_aligned(self) -> bool:
        """Whether a thread may read 16 bytes at once."""
        lists = (self.masters, self.weights, self.exp_avgs, self.exp_avg_sqs)
        return all(tensor.data_ptr() % 16 == 0 for tensors in lists for tensor in tensors)

    @cached_property
    def blocks(self) -> Tensor:
        """(programs, 2): the parameter of every program of the kernel, and which block of it."""
        return list_blocks([master.numel() for master in self.masters], BLOCK).to(self.steps.device)

    @cached_property
    def sizes(self) -> Tensor:
        return torch.tensor([master.numel() for master in self.masters]).to(self.steps.device)

    @cached_property
    def factors(self) -> Tensor:
        """(parameters, 2): factor of the learning rate, and weight decay."""
        return torch.tensor([self.lr_factors, self.weight_decays]).mT.contiguous().to(self.steps.device)

    @cached_property
    def weight_dtypes(self) -> set[torch.dtype]:
        return {weight.dtype for weight in self.weights}


def adamw_torch(
    tensors: MasterTensors,
    gradients: Sequence[Tensor | None],
    settings: AdamWSettings,
    divisor: Tensor,
    finite: Tensor,
) -> None:
    """The update by torch's fused kernel, on one float32 gradient after the other, and a copy to the weight."""
    divisor, found_inf = divisor.float(), 1.0 - finite.float()
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        master, weight = tensors.masters[index], tensors.weights[index]
        fused_adamw_(
            [master],
            [gradient.to(master.dtype, copy=True)],  # the kernel divides it in place
            [tensors.exp_avgs[index]],
            [tensors.exp_avg_sqs[index]],
            [],
            [tensors.steps[index]],
            lr=settings.lr * tensors.lr_factors[index],
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=tensors.weight_decays[index],
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )
        if weight is not master:
            weight.copy_(master)


def adamw_triton(
    tensors: MasterTensors,
    gradients: Sequence[Tensor | None],
    settings: AdamWSettings,
    divisor: Tensor,
    finite: Tensor,
) -> None:
    """The update of all parameters by one launch of a Triton kernel for each dtype of gradients and weights. Where both
    are bf16, it reads and writes 28 bytes per element.
    """
    from meshwright.core.kernels.adamw_kernel import DTYPES, adamw_kernel

    device, (beta1, beta2) = tensors.steps.device, settings.betas
    steps = tensors.steps.double()
    corrections = torch.stack([1 - beta1**steps, (1 - beta2**steps).sqrt()], dim=1).float()
    scalars = torch.stack([divisor.float(), finite.float()])
    for gradient_dtype in {gradient.dtype for gradient in gradients if gradient is not None}:
        for weight_dtype in tensors.weight_dtypes:
            pairs = zip(gradients, tensors.weights, strict=True)
            addresses = [
                gradient.data_ptr()
                if gradient is not None and (gradient.dtype, weight.dtype) == (gradient_dtype, weight_dtype)
                else 0
                for gradient, weight in pairs
            ]
            adamw_kernel[(len(tensors.blocks),)](
                tensors.addresses,
                host_to_device(torch.tensor(addresses), device),
                tensors.blocks,
                tensors.sizes,
                tensors.factors,
                corrections,
                scalars,
                settings.lr,
                beta1,
                beta2,
                1 - beta1,
                1 - beta2,
                settings.eps,
                GRADIENT=DTYPES[gradient_dtype],
                WEIGHT=DTYPES[weight_dtype],
                ALIGNED=all(address % 16 == 0 for address in addresses) and tensors.is_aligned,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )


def list_blocks(sizes: Sequence[int], block: int) -> Tensor:
    """(programs, 2): the tensor of every program of a kernel, and which block of `block` elements of it."""
    counts = torch.tensor([-(-size // block) for size in sizes])
    tensors = torch.arange(len(counts)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[tensors]
    return torch.stack([tensors, torch.arange(len(tensors)) - first], dim=1).int()


def like(master: Tensor, gradient: Tensor) -> Tensor:
    """A copy of a gradient with the strides of its master weight."""
    return torch.empty_like(master, dtype=gradient.dtype).copy_(gradient)


def host_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a small tensor to the device; the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
