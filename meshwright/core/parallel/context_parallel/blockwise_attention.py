"""Attention of queries to one block of keys and values, with results that merge exactly.

The result of a block is its output and, for each query, the log-sum-exp (lse) of its scores. Two results merge by
weighting each with its share of the sum of exponentials. Backward needs only the merged output and lse: the weights of
a block are exp(score - lse), so the gradients of each block are computed separately and added. (Milakov and Gimelshein
2018, online softmax, arXiv:1805.02867; Dao 2022, FlashAttention, appendix B, arXiv:2205.14135; Liu 2023, ring
attention, arXiv:2310.01889.)

Queries, keys and values have shape (batch, heads, tokens, head size); keys and values may have fewer heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.core import torch_private

EMPTY_LSE = float("-inf")
"""The lse of a query that sees no key."""
MAX_FLASH_HEAD_SIZE = 256


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees: all, or with `causal` those that are not later, where queries and keys are the same
    tokens; with documents, only those of the query's document.
    """

    causal: bool = False
    query_documents: Tensor | None = None
    """the document of each query, (batch, queries)"""
    key_documents: Tensor | None = None
    """the document of each key, (batch, keys)"""


class AttentionResult(NamedTuple):
    """The attention of queries to some of the keys."""

    out: Tensor
    """(batch, heads, queries, head size)"""
    lse: Tensor
    """(batch, heads, queries), in float32 or float64"""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.promote_types(dtype, torch.float32)


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> AttentionResult:
    """The output has the accumulation dtype, or the dtype of the inputs where the flash kernel computes it."""
    forward = flash_attention if uses_flash_kernel(q, mask) else reference_attention
    return forward(q, k, v, mask)


def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: AttentionResult, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """The contribution of this block to the gradients of q, k and v; `merged` is the result over all blocks."""
    backward = flash_attention_backward if uses_flash_kernel(q, mask) else reference_attention_backward
    return backward(grad, q, k, v, merged, mask)


def merge_result(total: AttentionResult, block: AttentionResult) -> None:
    """Merges the result of one more block into `total`, in place."""
    merged_lse = torch.logaddexp(total.lse, block.lse)
    finite = finite_lse(merged_lse)
    block_share = (block.lse - finite).exp()[..., None]
    total.out.mul_((total.lse - finite).exp()[..., None]).add_(block.out * block_share)
    total.lse.copy_(merged_lse)


def finite_lse(lse: Tensor) -> Tensor:
    """An lse that can be subtracted from scores: -inf minus -inf is NaN, and exp(-inf minus 0) is 0."""
    return lse.masked_fill(lse == EMPTY_LSE, 0.0)


def uses_flash_kernel(q: Tensor, mask: AttentionMask) -> bool:
    """Whether torch's flash kernels support this block; they have no document mask."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    head_size = q.shape[-1]
    return (
        q.is_cuda and half and mask.query_documents is None and head_size % 8 == 0 and head_size <= MAX_FLASH_HEAD_SIZE
    )


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> AttentionResult:
    out, lse, *_ = torch_private.flash_attention(q, k, v, 0.0, mask.causal)
    return AttentionResult(out, lse)


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: AttentionResult, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel needs a contiguous lse. It does not read the random state, since there is no dropout."""
    unused_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch_private.flash_attention_backward(
        grad.contiguous(), q, k, v, merged.out, merged.lse.contiguous(),
        None, None, q.shape[2], k.shape[2], 0.0, mask.causal, unused_state, unused_state,
    )  # fmt: skip
    return gradients


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> AttentionResult:
    with torch.autocast(q.device.type, enabled=False):  # autocast would compute the products in half precision
        scores = attention_scores(q, k, mask)
        lse = scores.logsumexp(-1)
        weights = (scores - finite_lse(lse)[..., None]).exp()
        out = weights.flatten(2, 3) @ v.to(scores.dtype)
    return AttentionResult(out.view(*q.shape), lse.view(q.shape[:3]))


def reference_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: AttentionResult, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of softmax is ds = p (dp - sum(p dp)), and the sum over all blocks equals grad . out."""
    with torch.autocast(q.device.type, enabled=False):
        scores = attention_scores(q, k, mask)
        batch, key_heads, queries = scores.shape[0], scores.shape[1], scores.shape[2] * scores.shape[3]
        grouped_shape = (batch, key_heads, queries, q.shape[-1])
        grad_wide, q_wide, k_wide, v_wide, out_wide = (x.to(scores.dtype) for x in (grad, q, k, v, merged.out))
        weights = (scores - finite_lse(merged.lse).reshape(*scores.shape[:4], 1)).exp().flatten(2, 3)
        grad_dot_out = (grad_wide * out_wide).sum(-1).reshape(batch, key_heads, queries, 1)
        grouped_grad = grad_wide.reshape(grouped_shape)
        grad_scores = weights * (grouped_grad @ v_wide.transpose(-1, -2) - grad_dot_out) * q.shape[-1] ** -0.5
        grad_q = grad_scores @ k_wide
        grad_k = grad_scores.transpose(-1, -2) @ q_wide.reshape(grouped_shape)
        return grad_q.view(q.shape), grad_k, weights.transpose(-1, -2) @ grouped_grad


def attention_scores(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    """(batch, key heads, query heads per key head, queries, keys); -inf where a query does not see a key.

    The query heads of one key head are computed as more queries of that head, so keys are not copied.
    """
    batch, heads, queries, head_size = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    grouped = q.to(accumulation_dtype(q.dtype)).reshape(batch, key_heads, heads // key_heads * queries, head_size)
    scores: Tensor = grouped @ k.to(grouped.dtype).transpose(-1, -2) * head_size**-0.5
    scores = scores.view(batch, key_heads, heads // key_heads, queries, keys)
    masked = masked_positions(mask, queries, keys, q.device)
    return scores if masked is None else scores.masked_fill(masked, EMPTY_LSE)


def masked_positions(mask: AttentionMask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """True where a query does not see a key; broadcasts to the scores."""
    future = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1) if mask.causal else None
    if mask.query_documents is None or mask.key_documents is None:
        return future
    other_document = (mask.query_documents[:, :, None] != mask.key_documents[:, None, :])[:, None, None]
    return other_document if future is None else other_document | future
