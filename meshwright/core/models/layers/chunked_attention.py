"""Causal attention within documents and windows, by chunks of queries, so that no mask of full sequences exists.

A chunk of queries attends to the keys from its earliest visible one up to its last query. Forward keeps the output and
the log-sum-exp (lse) of every query; backward computes the mask and the scores of each chunk again. On CUDA, half
precision runs in torch's flash kernel for sequences of different lengths, one sequence per document.

`attention` is an operator of torch, so that compilation, activation checkpointing and the simulator see one call whose
sizes do not depend on the data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.core import torch_private

QUERIES = 128
"""The queries of one chunk."""
MAX_FLASH_HEAD_SIZE = 256


@torch.library.custom_op("meshwright::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The output, (batch, heads, queries, value size), and the lse. Queries are the last tokens of the keys; documents
    are those of the keys and do not decrease along a sequence.
    """
    if uses_varlen_kernel(q, k, v, cap):
        return varlen_attention(q, k, v, documents, window, scale)
    return chunked_attention(q, k, v, documents, window, scale, cap)


@torch.library.custom_op("meshwright::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if uses_varlen_kernel(q, k, v, cap):
        return varlen_attention_backward(grad, q, k, v, out, lse, documents, window, scale)
    return chunked_attention_backward(grad, q, k, v, out, lse, documents, window, scale, cap)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, _documents: Tensor | None, _window: int | None, _scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    if uses_varlen_kernel(q, k, v, cap):
        out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
        return out, q.new_empty(heads, batch * queries, dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@attention_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, documents, *output)


def backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, documents, out, lse = ctx.saved_tensors
    gradients = attention_backward(grad, q, k, v, out, lse, documents, *ctx.options)
    return (*gradients, None, None, None, None)


attention.register_autograd(backward, setup_context=save_for_backward)


@register_flop_formula(torch.ops.meshwright.attention)
def flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_args: Any, **_options: Any) -> int:
    """The FLOPs of all pairs of tokens, as torch counts those of its own attention."""
    batch, heads, queries, size = q
    return 2 * batch * heads * queries * k[2] * (size + v[-1])


@register_flop_formula(torch.ops.meshwright.attention_backward)
def backward_flops(_grad: tuple[int, ...], *shapes: Any, **_options: Any) -> int:
    """Five products instead of two: backward recomputes the scores."""
    return flops(*shapes) * 5 // 2


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.promote_types(dtype, torch.float32)


# Chunks of queries, on any device.


@dataclass(frozen=True)
class Chunk:
    """Consecutive queries of some rows of a batch, and the keys that any of them may see."""

    rows: slice
    queries: slice
    keys: slice

    def of_queries(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows, :, self.queries]

    def of_keys(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows, :, self.keys]

    def visible(self, offset: int, documents: Tensor | None, window: int | None, device: torch.device) -> Tensor:
        """True where a query sees a key; broadcasts to (rows, heads, queries, keys)."""
        queries = torch.arange(self.queries.start + offset, self.queries.stop + offset, device=device)[:, None]
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        if documents is None:
            return visible[None, None]
        own, theirs = documents[self.rows, queries[:, 0]], documents[self.rows, self.keys]
        return (visible & (own[:, :, None] == theirs[:, None, :]))[:, None]


def chunks_of(queries: int, keys: int, documents: Tensor | None, window: int | None) -> Iterator[Chunk]:
    """All chunks in order. Rows whose first visible key is the same are one chunk."""
    offset = keys - queries
    first_keys = None if documents is None else first_keys_of_documents(documents, offset)
    for index, start in enumerate(range(0, queries, QUERIES)):
        stop = min(start + QUERIES, queries)
        first = 0 if window is None else max(0, offset + start - window + 1)
        if first_keys is None:
            yield Chunk(slice(None), slice(start, stop), slice(first, offset + stop))
            continue
        rows = [max(first, of_row[index]) for of_row in first_keys]
        for begin, group in groupby(range(len(rows)), rows.__getitem__):
            members = list(group)
            yield Chunk(slice(members[0], members[-1] + 1), slice(start, stop), slice(begin, offset + stop))


def first_keys_of_documents(documents: Tensor, offset: int) -> list[list[int]]:
    """For each row and chunk, the first key of the document of the chunk's first query."""
    if bool((documents[:, 1:] < documents[:, :-1]).any()):
        raise ValueError("document ids decrease along a sequence; expected ids in the order of the documents")
    firsts: list[list[int]] = torch.searchsorted(documents, documents[:, offset::QUERIES].contiguous()).tolist()
    return firsts


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    offset = k.shape[2] - q.shape[2]
    forward = flash_chunk if uses_cpu_kernel(q, v, cap) else explicit_chunk
    with torch.autocast(q.device.type, enabled=False):
        for chunk in chunks_of(q.shape[2], k.shape[2], documents, window):
            visible = chunk.visible(offset, documents, window, q.device)
            own_out, own_lse = forward(
                chunk.of_queries(q), chunk.of_keys(k), chunk.of_keys(v), visible, scale, cap
            )  # fmt: skip
            chunk.of_queries(out).copy_(own_out)
            chunk.of_queries(lse).copy_(own_lse)
    return out, lse


def chunked_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(tensor, dtype=accumulation_dtype(q.dtype)) for tensor in (k, v))
    offset = k.shape[2] - q.shape[2]
    backward = flash_chunk_backward if uses_cpu_kernel(q, v, cap) else explicit_chunk_backward
    with torch.autocast(q.device.type, enabled=False):
        for chunk in chunks_of(q.shape[2], k.shape[2], documents, window):
            visible = chunk.visible(offset, documents, window, q.device)
            own_q, own_k, own_v = backward(
                chunk.of_queries(grad), chunk.of_queries(q), chunk.of_keys(k), chunk.of_keys(v),
                chunk.of_queries(out), chunk.of_queries(lse), visible, scale, cap,
            )  # fmt: skip
            chunk.of_queries(grad_q).copy_(own_q)
            chunk.of_keys(grad_k).add_(own_k)
            chunk.of_keys(grad_v).add_(own_v)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def uses_cpu_kernel(q: Tensor, v: Tensor, cap: float | None) -> bool:
    """Whether torch's flash kernel for CPU computes a chunk."""
    return q.device.type == "cpu" and cap is None and q.shape[-1] == v.shape[-1]


def additive_mask(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, -torch.inf)


def flash_chunk(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, _cap: float | None
) -> tuple[Tensor, Tensor]:
    mask = additive_mask(visible, q)
    return torch_private.cpu_flash_attention(q, k, v, 0.0, False, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]


def flash_chunk_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor,
    scale: float,
    _cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch_private.cpu_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, 0.0, False, attn_mask=additive_mask(visible, q), scale=scale
    )


def explicit_chunk(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The query heads of one key head are computed as more queries of that head, so keys are not copied."""
    scores = chunk_scores(q, k, scale, cap)[0]
    masked = scores.view(*q.shape[:3], -1).masked_fill(~visible, -torch.inf)
    lse = masked.logsumexp(-1)
    weights = (masked - lse[..., None]).exp().view(scores.shape)
    return (weights @ v.to(weights.dtype)).reshape(*q.shape[:3], -1).to(q.dtype), lse


def explicit_chunk_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of softmax is ds = p (dp - sum(p dp)), and the sum equals grad . out."""
    scores, slope = chunk_scores(q, k, scale, cap)
    wide = scores.dtype
    masked = scores.view(*q.shape[:3], -1).masked_fill(~visible, -torch.inf)
    weights = (masked - lse[..., None]).exp().view(scores.shape)
    grouped_grad = grad.to(wide).reshape(*scores.shape[:3], -1)
    grad_dot_out = (grad.to(wide) * out.to(wide)).sum(-1).reshape(*scores.shape[:3], 1)
    grad_scores = weights * (grouped_grad @ v.to(wide).transpose(-1, -2) - grad_dot_out) * scale
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_q = (grad_scores @ k.to(wide)).reshape(q.shape)
    grad_k = grad_scores.transpose(-1, -2) @ q.to(wide).reshape(*scores.shape[:3], -1)
    return grad_q, grad_k, weights.transpose(-1, -2) @ grouped_grad


def chunk_scores(q: Tensor, k: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Scores, (rows, key heads, queries of the head, keys), and the slope of the soft cap at each score."""
    grouped = q.to(accumulation_dtype(q.dtype)).reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores: Tensor = grouped @ k.to(grouped.dtype).transpose(-1, -2) * scale
    if cap is None:
        return scores, None
    share = (scores / cap).tanh()
    return cap * share, 1 - share**2


# The flash kernel for sequences of different lengths, on CUDA.


def uses_varlen_kernel(q: Tensor, k: Tensor, v: Tensor, cap: float | None) -> bool:
    """Whether torch's flash kernels for CUDA support these tensors: half precision, and no soft cap."""
    size = q.shape[-1]
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and cap is None
        and q.shape[2] == k.shape[2]
        and size == v.shape[-1]
        and size % 8 == 0
        and size <= MAX_FLASH_HEAD_SIZE
    )


LAST_STARTS: list[tuple[weakref.ref[Tensor], Tensor]] = []
"""The documents of the last call and their starts: all blocks of a model get the same tensor, and reading the number
of its documents waits for the device.
"""


def sequence_starts(batch: int, tokens: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Where each document starts among the tokens of all rows, and their number, in int32."""
    if documents is None:
        return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
    if LAST_STARTS and LAST_STARTS[0][0]() is documents:
        return LAST_STARTS[0][1]
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    end = torch.tensor([batch * tokens], device=device)
    starts = torch.cat((is_start.flatten().nonzero()[:, 0], end)).to(torch.int32)
    LAST_STARTS[:] = [(weakref.ref(documents), starts)]
    return starts


def by_token(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(tokens of all rows, heads, size), as the kernel takes it."""
    return tuple(tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in tensors)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = q.shape
    starts = sequence_starts(batch, tokens, documents, q.device)
    out, lse, *_ = torch_private.varlen_flash_attention(
        *by_token(q, k, v), starts, starts, tokens, tokens, 0.0, True, False,
        scale=scale, window_size_left=window_left(window), window_size_right=0,
    )  # fmt: skip
    return out.view(batch, tokens, *out.shape[1:]).transpose(1, 2), lse


def varlen_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel does not read the random state, since there is no dropout."""
    batch, _, tokens, _ = q.shape
    starts = sequence_starts(batch, tokens, documents, q.device)
    unused_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients = torch_private.varlen_flash_attention_backward(
        *by_token(grad, q, k, v, out), lse, starts, starts, tokens, tokens, 0.0, True, unused_state, unused_state,
        scale=scale, window_size_left=window_left(window), window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (g.view(batch, tokens, *g.shape[1:]).transpose(1, 2) for g in gradients)
    return dq, dk, dv


def window_left(window: int | None) -> int:
    """The keys before a query that it sees; -1: all."""
    return -1 if window is None else window - 1
