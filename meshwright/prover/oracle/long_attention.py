"""Attention with the backward pass of fused kernels: some queries at a time, and probabilities computed anew. In low
precision it rounds where these kernels round, so that long sequences fit and the noise of the kernels is measured.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SCORES = 1 << 18
"""Scores that are in memory at the same time, so that they stay in the cache."""


class LongAttention(torch.autograd.Function):
    """softmax(q k) v for one head, (sequence, head size), with the document of every token; q is already scaled. `low`
    is the dtype of queries, keys and values: kernels round probabilities, the output and the gradient of scores to it.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, low: torch.dtype) -> Tensor:
        out = torch.empty_like(v)
        for rows in query_blocks(len(q)):
            out[rows] = rounded(probabilities(q, k, documents, rows), low) @ v[: rows.stop]
        out = rounded(out, low)
        ctx.save_for_backward(q, k, v, documents, out)
        ctx.low = low
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, documents, out = ctx.saved_tensors
        (d_out,) = gradients
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mean = (d_out * out).sum(dim=-1, keepdim=True)  # the derivative of a softmax is p (d_p - sum of p d_p)
        for rows in query_blocks(len(q)):
            seen = slice(0, rows.stop)
            p = probabilities(q, k, documents, rows)
            d_v[seen] += rounded(p, ctx.low).mT @ d_out[rows]
            d_scores = rounded((d_out[rows] @ v[seen].mT).sub_(mean[rows]).mul_(p), ctx.low)
            d_q[rows] = d_scores @ k[seen]
            d_k[seen] += d_scores.mT @ q[rows]
        return d_q, d_k, d_v, None, None


def query_blocks(sequence: int) -> list[slice]:
    count = max(1, SCORES // sequence)
    return [slice(start, min(start + count, sequence)) for start in range(0, sequence, count)]


def probabilities(q: Tensor, k: Tensor, documents: Tensor, rows: slice) -> Tensor:
    """Those of some queries over the keys up to the last of them."""
    scores = q[rows] @ k[: rows.stop].mT
    position = torch.arange(rows.stop, device=q.device)
    scores[:, rows].masked_fill_(position[rows, None] < position[rows], -math.inf)
    if documents[0] != documents[-1]:
        scores.masked_fill_(documents[rows, None] != documents[: rows.stop], -math.inf)
    return scores.softmax(dim=-1)


def rounded(x: Tensor, low: torch.dtype) -> Tensor:
    return x.to(low).to(x.dtype)
