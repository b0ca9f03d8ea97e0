"""Ring attention: keys and values travel around the context-parallel ranks, and each rank attends to them in turn.

With C ranks, batch B, K key heads, sequence length S, head size D and elements of e bytes (w bytes in the accumulation
dtype), the messages of one attention call on every rank are

    forward   C - 1 sends of 2 B K (S/C) D e: keys and values together
    backward  C - 1 sends of the same, and C - 1 sends of 2 B K (S/C) D w: the gradients of keys and values

Activation checkpointing adds another forward. (Liu 2023, arXiv:2310.01889.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.core.parallel.activation_memory.activation_checkpoint import recompute_all
from meshwright.core.parallel.context_parallel.attention_call import AttentionCall
from meshwright.core.parallel.context_parallel.blockwise_attention import (
    AttentionMask,
    AttentionResult,
    accumulation_dtype,
    block_attention,
    block_attention_backward,
    merge_result,
)
from meshwright.core.parallel.context_parallel.sequence_chunks import SequenceChunks, require_full_documents
from meshwright.errors import ConfigError

KEYS, GRADIENTS = 0, 1
"""Message tags: both kinds of message may be in flight to a rank at once."""


class PendingTransfer(NamedTuple):
    """A message to the next rank, and the one that is received from the previous rank."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class RingStep(NamedTuple):
    """The keys and values of one rank, and which queries attend to them."""

    source: int
    """the rank that owns the keys and values"""
    queries: slice
    """the local queries that see any of them"""
    keys: slice
    """the keys of the source that are seen"""
    k: Tensor
    v: Tensor
    mask: AttentionMask


class Ring:
    """The ranks of a process group in a ring. Rank numbers are those within the group."""

    def __init__(self, group: dist.ProcessGroup, causal: bool = True) -> None:
        self.group, self.causal = group, causal
        self.chunks = SequenceChunks("ring", group.size(), group.rank())

    def send_to_next(self, tensor: Tensor, tag: int) -> PendingTransfer:
        rank, ranks = self.chunks.rank, self.chunks.ranks
        received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=(rank - 1) % ranks)
        return PendingTransfer(tensor, received, dist.batch_isend_irecv([send, receive]))

    def steps(self, k: Tensor, v: Tensor, documents: Tensor | None) -> Iterator[RingStep]:
        """The keys and values of every rank, starting with the local ones; the next ones are in flight meanwhile."""
        rank, ranks = self.chunks.rank, self.chunks.ranks
        kv = torch.stack((k, v))
        for step in range(ranks):
            next_kv = self.send_to_next(kv, KEYS) if step + 1 < ranks else None
            source = (rank - step) % ranks
            queries, keys = visible_slices(rank, source, k.shape[2]) if self.causal else (slice(None), slice(None))
            visible_k, visible_v = kv[:, :, :, keys]
            yield RingStep(source, queries, keys, visible_k, visible_v, self.mask(source, queries, keys, documents))
            if next_kv is not None:
                kv = next_kv.wait()

    def mask(self, source: int, queries: slice, keys: slice, documents: Tensor | None) -> AttentionMask:
        causal = self.causal and source == self.chunks.rank
        if documents is None:
            return AttentionMask(causal)
        source_documents = self.chunks.for_rank(source).select(documents)
        return AttentionMask(causal, self.chunks.select(documents)[:, queries], source_documents[:, keys])


def visible_slices(rank: int, source: int, tokens: int) -> tuple[slice, slice]:
    """(queries of `rank`, keys of `source`) that take part in causal attention. For the rank's own keys the causal mask
    decides.

    Only the first chunk of an earlier rank precedes any of the local chunks, and it precedes both. Both chunks of a
    later rank lie between the two local chunks.
    """
    everything, half = slice(None), tokens // 2
    if source < rank:
        return everything, slice(half)
    return (slice(half, None), everything) if source > rank else (everything, everything)


class RingAttentionFunction(torch.autograd.Function):
    """Saves the inputs, the output and its log-sum-exp for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> Tensor:
        dtype = accumulation_dtype(q.dtype)
        result = AttentionResult(
            torch.zeros(q.shape, dtype=dtype, device=q.device),
            torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device),
        )
        for step in ring.steps(k, v, documents):
            block = block_attention(q[:, :, step.queries], step.k, step.v, step.mask)
            merge_result(slice_queries(result, step.queries), block)
        out = result.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, result.lse, documents)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, documents = ctx.saved_tensors
        ring, result = ctx.ring, AttentionResult(out, lse)
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        local_grad_kv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        transfer: PendingTransfer | None = None
        for step in ring.steps(k, v, documents):
            queries = step.queries
            block_q, block_k, block_v = block_attention_backward(
                grad[:, :, queries], q[:, :, queries], step.k, step.v, slice_queries(result, queries), step.mask
            )
            grad_q[:, :, queries] += block_q
            # The contribution of the local queries stays here; the sum over the other ranks travels the ring back home.
            is_local = step.source == ring.chunks.rank
            grad_kv = local_grad_kv if is_local else transfer.wait() if transfer else torch.zeros_like(local_grad_kv)
            grad_kv[0][:, :, step.keys] += block_k
            grad_kv[1][:, :, step.keys] += block_v
            if not is_local:
                transfer = ring.send_to_next(grad_kv, GRADIENTS)
        if transfer:
            local_grad_kv += transfer.wait()
        return grad_q.to(q.dtype), local_grad_kv[0].to(k.dtype), local_grad_kv[1].to(v.dtype), None, None


def slice_queries(result: AttentionResult, queries: slice) -> AttentionResult:
    return AttentionResult(result.out[:, :, queries], result.lse[:, :, queries])


def beyond_ring(what: str) -> ConfigError:
    """The error for attention that is more than softmax(scale q k) v with a causal mask or none."""
    return ConfigError(
        f"context.method = ring computes plain attention, and the attention of this model has {what}",
        "try context.method = all-to-all",
    )


class RingAttention:
    """The attention of a rank with two sequence chunks: plain softmax attention, causal or full."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rings = {causal: Ring(group, causal) for causal in (False, True)}

    def __call__(self, call: AttentionCall) -> Tensor:
        if beyond := "a mask" if call.mask is not None else call.beyond_plain:
            raise beyond_ring(beyond)
        q = call.q if call.scale is None else call.q * (call.scale * call.q.shape[-1] ** 0.5)
        require_full_documents(call.documents, q.shape[2] * self.group.size())
        with recompute_all():
            return RingAttentionFunction.apply(q, call.k, call.v, call.documents, self.rings[call.causal])  # type: ignore[no-any-return, no-untyped-call]
