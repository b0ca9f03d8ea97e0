"""Attention of some queries to one block of keys and values, so that blocks may come one after the other.

A block's result is its output and, for each query, the logarithm of its sum of exponentials (lse). Two results merge
exactly: each is weighed by its share of the sum. Backward needs no more than the merged output and lse: the weights of
a block are exp(score - lse) whichever block they are in, so each block's gradients are computed apart and added.
(Milakov and Gimelshein 2018, online softmax; Dao 2022, FlashAttention, its appendix B; Liu 2023, ring attention.)

Queries, keys and values are (batch, heads, tokens, head size); keys and values may have fewer heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY_LSE = float("-inf")
"""The lse of a query that sees no key: the sum is empty."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees: all, or those not after it where queries and keys are the same tokens (`causal`); of
    these, where documents are given, those of its own document.
    """

    causal: bool = False
    query_documents: Tensor | None = None
    """the document of each query, (batch, queries)"""
    key_documents: Tensor | None = None
    """the document of each key, (batch, keys)"""


class AttentionResult(NamedTuple):
    out: Tensor
    """(batch, heads, queries, head size)"""
    lse: Tensor
    """(batch, heads, queries), in float32 at least"""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of scores and sums."""
    return torch.promote_types(dtype, torch.float32)


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> AttentionResult:
    """The output is in float32 at least where the block is computed here, and in the inputs' precision by a kernel."""
    forward = flash_attention if uses_flash_kernel(q, mask) else reference_attention
    return forward(q, k, v, mask)


def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: AttentionResult, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v; `merged` is the result over all blocks."""
    backward = flash_attention_backward if uses_flash_kernel(q, mask) else reference_attention_backward
    return backward(grad, q, k, v, merged, mask)


def merge_result(into: AttentionResult, part: AttentionResult) -> None:
    """Adds one more block's result, in place."""
    both = torch.logaddexp(into.lse, part.lse)
    level = finite(both)
    share = (part.lse - level).exp()[..., None]
    into.out.mul_((into.lse - level).exp()[..., None]).add_(part.out * share)
    into.lse.copy_(both)


def finite(lse: Tensor) -> Tensor:
    """An lse that may be taken from scores: -inf less -inf would not be a number, and -inf less 0 weighs nothing."""
    return lse.masked_fill(lse == EMPTY_LSE, 0.0)


def uses_flash_kernel(q: Tensor, mask: AttentionMask) -> bool:
    """Whether torch's flash kernels compute this block; they know no documents."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and mask.query_documents is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> AttentionResult:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, mask.causal)
    return AttentionResult(out, lse)


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: AttentionResult, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel reads lse by address, and no random state: nothing is dropped."""
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad.contiguous(), q, k, v, merged.out, merged.lse.contiguous(),
        None, None, q.shape[2], k.shape[2], 0.0, mask.causal, unread, unread,
    )  # fmt: skip
    return gradients


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> AttentionResult:
    with torch.autocast(q.device.type, enabled=False):  # it would take the products to half precision again
        scores = attention_scores(q, k, mask)
        lse = scores.logsumexp(-1)
        weights = (scores - finite(lse)[..., None]).exp()
        out = weights.flatten(2, 3) @ v.to(scores.dtype)
    return AttentionResult(out.view(*q.shape), lse.view(q.shape[:3]))


def reference_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: AttentionResult, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Of softmax: ds = p (dp - sum of p dp), where that sum, over all blocks, is grad . out."""
    with torch.autocast(q.device.type, enabled=False):
        scores = attention_scores(q, k, mask)
        batch, groups, queries = scores.shape[0], scores.shape[1], scores.shape[2] * scores.shape[3]
        each = (batch, groups, queries, q.shape[-1])
        precise = [tensor.to(scores.dtype) for tensor in (grad, q, k, v, merged.out)]
        grad_wide, q_wide, k_wide, v_wide, out_wide = precise
        weights = (scores - finite(merged.lse).reshape(*scores.shape[:4], 1)).exp().flatten(2, 3)
        across = (grad_wide * out_wide).sum(-1).reshape(batch, groups, queries, 1)
        grouped = grad_wide.reshape(each)
        by_score = weights * (grouped @ v_wide.transpose(-1, -2) - across) * q.shape[-1] ** -0.5
        dq, dk = by_score @ k_wide, by_score.transpose(-1, -2) @ q_wide.reshape(each)
        return dq.view(q.shape), dk, weights.transpose(-1, -2) @ grouped


def attention_scores(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    """(batch, key heads, query heads to each, queries, keys); -inf where a query does not see a key.

    The query heads that share a key head are taken together as its queries, and the keys are copied for none of them.
    """
    batch, heads, queries, size = q.shape
    shared, keys = k.shape[1], k.shape[2]
    grouped = q.to(accumulation_dtype(q.dtype)).reshape(batch, shared, heads // shared * queries, size)
    scores: Tensor = grouped @ k.to(grouped.dtype).transpose(-1, -2) * size**-0.5
    scores = scores.view(batch, shared, heads // shared, queries, keys)
    hidden = masked_positions(mask, queries, keys, q.device)
    return scores if hidden is None else scores.masked_fill(hidden, EMPTY_LSE)


def masked_positions(mask: AttentionMask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """True where a query does not see a key; broadcasts to scores."""
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1) if mask.causal else None
    if mask.query_documents is None or mask.key_documents is None:
        return hidden
    foreign = (mask.query_documents[:, :, None] != mask.key_documents[:, None, :])[:, None, None]
    return foreign if hidden is None else foreign | hidden
