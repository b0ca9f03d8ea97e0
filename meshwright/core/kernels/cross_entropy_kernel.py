"""The Triton kernels of the fused loss: the cross-entropy of rows of logits and its gradient, and a scaled copy."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8
"""Logits of a row that a program loads at a time, and its warps: the fastest of 16 pairs on an H200."""
SCALE_BLOCK = 4096
"""Elements per program of the scaled copy."""


@triton.jit
def cross_entropy_rows(
    logits,
    stride,
    labels,
    log_sums,
    targets,
    vocab,
    width,
    ignore_index,
    softcap,
    CAPPED: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: a pass over the logits computes log-sum-exp, and a second one writes the gradient. A row has
    `width` elements, of which the first `vocab` are logits; the gradient of the others is zero.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    lane = tl.arange(0, BLOCK)
    if label == ignore_index:
        if STATISTICS:
            tl.store(log_sums + row, 0.0)
            tl.store(targets + row, 0.0)
        if GRADIENT:
            for start in range(0, width, BLOCK):
                index = start + lane
                tl.store(logits + index, tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty), mask=index < width)
    else:
        if STATISTICS:
            # every lane keeps the maximum of its logits and the sum of exp(logit - maximum)
            maximum = tl.full([BLOCK], -1e30, tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                index = start + lane
                x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
                if CAPPED:
                    x = tl.where(index < vocab, softcap - 2.0 * softcap / (tl.exp(2.0 * x / softcap) + 1.0), x)
                above = x - maximum
                ratio = tl.exp(-tl.abs(above))
                total = tl.where(above > 0, total * ratio + 1.0, total + ratio)
                maximum = tl.maximum(maximum, x)
            largest = tl.max(maximum, 0)
            log_sum = largest + tl.log(tl.sum(total * tl.exp(maximum - largest), 0))
            tl.store(log_sums + row, log_sum)
            inside = (label >= 0) & (label < vocab)
            target = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32)
            if CAPPED:
                target = softcap - 2.0 * softcap / (tl.exp(2.0 * target / softcap) + 1.0)
            tl.store(targets + row, tl.where(inside, target, float("-inf")))
        else:
            log_sum = tl.load(log_sums + row)
        if GRADIENT:
            tl.debug_barrier()  # every thread has read the target before one overwrites it
            for start in range(0, width, BLOCK):
                index = start + lane
                # outside of the vocabulary the probability of -inf is zero, or with a cap the slope
                x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
                slope = 1.0
                if CAPPED:
                    tanh = 1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0)
                    x = softcap * tanh
                    slope = 1.0 - tanh * tanh
                is_target = (index == label) & (index < vocab)
                gradient = (tl.exp(x - log_sum) - tl.where(is_target, 1.0, 0.0)) * slope
                tl.store(logits + index, gradient.to(logits.dtype.element_ty), mask=index < width)


@triton.jit
def scale_elements(source, factor, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + index, mask=index < count).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(target + index, x.to(target.dtype.element_ty), mask=index < count)


def launch_scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns source * factor in a dtype. The source is contiguous, and the factor is a scalar."""
    target = torch.empty_like(source, dtype=dtype)
    scale_elements[(triton.cdiv(source.numel(), SCALE_BLOCK),)](
        source, factor, target, source.numel(), BLOCK=SCALE_BLOCK, num_warps=8
    )
    return target


def launch(
    logits: Tensor,
    vocab: int,
    labels: Tensor,
    log_sums: Tensor,
    targets: Tensor,
    ignore_index: int,
    softcap: float | None,
    *,
    statistics: bool,
    gradient: bool,
) -> None:
    """Computes the statistics of every row of logits, or its gradient from statistics, or both."""
    cross_entropy_rows[(len(logits),)](
        logits,
        logits.stride(0),
        labels,
        log_sums,
        targets,
        vocab,
        logits.shape[1],
        ignore_index,
        softcap or 1.0,
        CAPPED=softcap is not None,
        STATISTICS=statistics,
        GRADIENT=gradient,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
