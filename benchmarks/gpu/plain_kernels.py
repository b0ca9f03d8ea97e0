"""The two Triton kernels of the best plain loop: AdamW on float32 master weights, and in-place cross-entropy.

They are the contender's own, independent of Meshwright's. This module needs Triton, which torch has on CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from benchmarks.gpu.shapes import BETAS, CLIP, EPS, LR, WEIGHT_DECAY


@triton.jit
def adamw_kernel(  # type: ignore[no-untyped-def]
    weight, master, gradient, first, second, scalars, size, lr, beta1, beta2, eps, decay, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    clip, correction1, correction2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    g = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32) * clip
    w = tl.load(master + index, mask=inside, other=0.0)
    m = beta1 * tl.load(first + index, mask=inside, other=0.0) + (1 - beta1) * g
    v = beta2 * tl.load(second + index, mask=inside, other=0.0) + (1 - beta2) * g * g
    w = w * (1 - lr * decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(first + index, m, mask=inside)
    tl.store(second + index, v, mask=inside)
    tl.store(master + index, w, mask=inside)
    tl.store(weight + index, w.to(weight.dtype.element_ty), mask=inside)


class MasterAdamW:
    """AdamW of bfloat16 weights with float32 master weights and moments; the clip factor never leaves the device."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.first = [torch.zeros_like(w) for w in self.masters]
        self.second = [torch.zeros_like(w) for w in self.masters]
        device = self.parameters[0].device
        self.steps, self.scalars = torch.zeros((), device=device), torch.ones(3, device=device)

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()
        self.steps += 1
        self.scalars[0] = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        self.scalars[1] = 1 - BETAS[0] ** self.steps
        self.scalars[2] = 1 - BETAS[1] ** self.steps
        for p, w, g, m, v in zip(self.parameters, self.masters, gradients, self.first, self.second, strict=True):
            grid = (triton.cdiv(p.numel(), 1024),)
            adamw_kernel[grid](
                p, w, g, m, v, self.scalars, p.numel(), LR, *BETAS, EPS, WEIGHT_DECAY, BLOCK=1024, num_warps=4
            )

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@triton.jit
def cross_entropy_kernel(logits, stride, targets, losses, vocab, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    chosen = tl.load(logits + target).to(tl.float32)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, vocab, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        value = tl.load(logits + index, mask=index < vocab, other=-1e30).to(tl.float32)
        higher = tl.maximum(top, value)
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    largest = tl.max(top, 0)
    log_sum = largest + tl.log(tl.sum(total * tl.exp(top - largest), 0))
    tl.store(losses + row, (log_sum - chosen) * scale)
    tl.debug_barrier()
    for offset in range(0, vocab, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        value = tl.load(logits + index, mask=index < vocab, other=-1e30).to(tl.float32)
        gradient = (tl.exp(value - log_sum) - tl.where(index == target, 1.0, 0.0)) * scale
        tl.store(logits + index, gradient.to(logits.dtype.element_ty), mask=index < vocab)


class LinearCrossEntropy(torch.autograd.Function):
    """Output projection and mean cross-entropy: logits exist in bfloat16 only and become their gradient in place.
    Backward assumes that the loss is the end of the graph.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        logits = hidden @ weight.t()
        losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
        cross_entropy_kernel[(len(logits),)](
            logits, logits.stride(0), targets, losses, logits.shape[1], 1 / len(logits), BLOCK=4096, num_warps=8
        )
        ctx.save_for_backward(logits @ weight, logits.t() @ hidden)
        return losses.sum()

    @staticmethod
    def backward(ctx, _gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient, weight_gradient, None


@torch.compiler.disable
def fused_head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return LinearCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-any-return]
