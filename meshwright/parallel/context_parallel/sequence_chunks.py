"""Context parallelism: each rank has a piece of every sequence, and attention alone reaches across pieces.

Two ways, both exact. Of C ranks, with batch B, query heads H, key heads K, sequence S, head size D and elements of e
bytes (w bytes in the precision of sums: float32, or float64 for float64), one attention call's messages are, on every
rank,

ring         forward   C - 1 sends of 2 B K (S/C) D e: keys and values together go once round
             backward  C - 1 sends of the same, and C - 1 sends of 2 B K (S/C) D w: their gradients come home with them
all-to-all   forward   one exchange of B (H + 2 K') (S/C) D e, K' = lcm(K, C), and one of B H (S/C) D e
             backward  the same two

A send's bytes are all on the wire; of an exchange, the part (C-1)/C. Recomputation adds another forward.

The ring gives rank r the chunks r and 2C-1-r of 2C. In causal order every rank then has the same work at every step:
its own piece first; later either all its queries see the first half of the keys that come, or the second half of its
queries sees all of them. All-to-all gives rank r the chunk r of C, and H must divide by C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.errors import ConfigError
from meshwright.models.decoder import CoreAttention, RotaryEmbedding, document_ids
from meshwright.parallel.activation_checkpoint import recompute_all
from meshwright.parallel.all_to_all import all_to_all
from meshwright.parallel.context_parallel.blockwise_attention import (
    AttentionMask,
    AttentionResult,
    accumulation_dtype,
    block_attention,
    block_attention_backward,
    merge_result,
)

Method = Literal["ring", "all-to-all"]
KEYS, GRADIENTS = 0, 1
"""Tags: both kinds of messages may be on their way to a rank at once."""


@dataclass(frozen=True)
class SequenceChunks:
    """Which part of each sequence a rank has, of so many ranks."""

    method: Method
    ranks: int
    rank: int

    def spans(self, sequence: int) -> list[range]:
        """The parts of a whole sequence that are the rank's, in order."""
        chunks = self.ranks * (2 if self.method == "ring" else 1)
        if sequence % chunks:
            raise ConfigError(
                f"a sequence of {sequence} tokens does not divide into {chunks} equal chunks, as context = "
                f"{self.ranks} by {self.method} needs",
                f"allowed: a multiple of {chunks}",
            )
        size = sequence // chunks
        own = (self.rank, chunks - 1 - self.rank) if self.method == "ring" else (self.rank,)
        return [range(chunk * size, (chunk + 1) * size) for chunk in own]

    def positions(self, sequence: int, device: torch.device | None = None) -> Tensor:
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans(sequence)])

    def select(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The rank's own piece of a tensor over whole sequences."""
        return torch.cat([whole.narrow(dim, span.start, len(span)) for span in self.spans(whole.shape[dim])], dim)

    def for_rank(self, rank: int) -> SequenceChunks:
        """Another rank's."""
        return SequenceChunks(self.method, self.ranks, rank)


def local_chunk(batch: tuple[Tensor, ...], pieces: SequenceChunks | None, separator: int | None) -> tuple[Tensor, ...]:
    """(tokens, labels) of whole sequences -> the rank's tokens and labels, and the documents of the whole where there
    are any: all that a LanguageModel is given, or a stage that never sees the tokens.
    """
    tokens, labels = batch
    documents = document_ids(tokens, separator)
    own = (tokens, labels) if pieces is None else (pieces.select(tokens), pieces.select(labels))
    return own if documents is None else (*own, documents)


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup, method: Method) -> SequenceChunks:
    """Puts attention across the group's ranks, and positions of this rank's piece, in place of the model's own; what
    the rank's piece is.
    """
    pieces = SequenceChunks(method, group.size(), group.rank())
    found = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RotaryEmbedding):
                setattr(module, name, ChunkRotaryEmbedding(child, pieces))
            elif isinstance(child, CoreAttention):
                setattr(module, name, RingAttention(group) if method == "ring" else AllToAllAttention(group, child))
                found += 1
    if not found:
        raise ConfigError(
            "context divides sequences where tokens attend to each other, and the model has no Attend",
            "allowed: context = 1, or a model whose attention is meshwright.models.decoder.CoreAttention",
        )
    return pieces


class ChunkRotaryEmbedding(RotaryEmbedding):
    """The positions, in their whole sequences, of the tokens of a rank's piece."""

    def __init__(self, places: RotaryEmbedding, pieces: SequenceChunks) -> None:
        nn.Module.__init__(self)
        self.head_size, self.theta, self.chunks = places.head_size, places.theta, pieces

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return self.chunks.positions(tokens * self.chunks.ranks, device)


class PendingTransfer(NamedTuple):
    """A message that leaves for the next rank, and the one that comes from the rank before."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class RingStep(NamedTuple):
    """One rank's keys and values, here for a step, and what of this rank's attention they take part in."""

    source: int
    queries: slice
    """the queries of this rank's piece that see any of them"""
    keys: slice
    """the keys of the piece that are seen"""
    k: Tensor
    v: Tensor
    mask: AttentionMask


class Ring:
    """The ranks of a group in a circle. Ranks here are the group's own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.chunks = SequenceChunks("ring", group.size(), group.rank())

    def send_to_next(self, tensor: Tensor, tag: int) -> PendingTransfer:
        rank, ranks = self.chunks.rank, self.chunks.ranks
        coming = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, coming, group=self.group, tag=tag, group_peer=(rank - 1) % ranks)
        return PendingTransfer(tensor, coming, dist.batch_isend_irecv([send, receive]))

    def steps(self, k: Tensor, v: Tensor, documents: Tensor | None) -> Iterator[RingStep]:
        """Every rank's keys and values in turn, this rank's first; the next are on their way while these are used."""
        rank, ranks = self.chunks.rank, self.chunks.ranks
        held = torch.stack((k, v))
        for step in range(ranks):
            next_one = self.send_to_next(held, KEYS) if step + 1 < ranks else None
            source = (rank - step) % ranks
            rows, columns = visible_slices(rank, source, k.shape[2])
            seen_k, seen_v = held[:, :, :, columns]
            yield RingStep(source, rows, columns, seen_k, seen_v, self.mask(source, rows, columns, documents))
            if next_one is not None:
                held = next_one.wait()

    def mask(self, source: int, rows: slice, columns: slice, documents: Tensor | None) -> AttentionMask:
        causal = source == self.chunks.rank
        if documents is None:
            return AttentionMask(causal)
        theirs = self.chunks.for_rank(source).select(documents)
        return AttentionMask(causal, self.chunks.select(documents)[:, rows], theirs[:, columns])


def visible_slices(rank: int, source: int, tokens: int) -> tuple[slice, slice]:
    """Which queries of a rank's piece see which keys of another's, in causal order; of its own, all, by the mask.

    Of an earlier rank only the first chunk is before any of ours, and before both. A later rank's chunks both lie
    between our two.
    """
    whole, half = slice(None), tokens // 2
    if source < rank:
        return whole, slice(half)
    return (slice(half, None), whole) if source > rank else (whole, whole)


class RingAttentionFunction(torch.autograd.Function):
    """Saves the inputs, the output and its lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> Tensor:
        result = AttentionResult(
            torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device),
            torch.full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device),
        )
        for visit in ring.steps(k, v, documents):
            part = block_attention(q[:, :, visit.queries], visit.k, visit.v, visit.mask)
            merge_result(slice_queries(result, visit.queries), part)
        out = result.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, result.lse, documents)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, documents = ctx.saved_tensors
        ring, result = ctx.ring, AttentionResult(out, lse)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        home = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        on_its_way: PendingTransfer | None = None
        for visit in ring.steps(k, v, documents):
            rows = visit.queries
            part_q, part_k, part_v = block_attention_backward(
                grad[:, :, rows], q[:, :, rows], visit.k, visit.v, slice_queries(result, rows), visit.mask
            )
            dq[:, :, rows] += part_q
            # what keys and values give their own rank stays there; the first to add on the way round is the next rank
            own = visit.source == ring.chunks.rank
            total = home if own else on_its_way.wait() if on_its_way else torch.zeros_like(home)
            total[0][:, :, visit.keys] += part_k
            total[1][:, :, visit.keys] += part_v
            if not own:
                on_its_way = ring.send_to_next(total, GRADIENTS)
        if on_its_way:
            home += on_its_way.wait()
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None


def slice_queries(result: AttentionResult, rows: slice) -> AttentionResult:
    return AttentionResult(result.out[:, :, rows], result.lse[:, :, rows])


class RingAttention(nn.Module):
    """Attend, of a rank's piece: keys and values go round the ring. `documents` are of the whole sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.ring = Ring(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        check(documents, q.shape[2] * self.ring.chunks.ranks)
        with recompute_all():
            return RingAttentionFunction.apply(q, k, v, documents, self.ring)  # type: ignore[no-any-return, no-untyped-call]


class AllToAllAttention(nn.Module):
    """Attend, of a rank's piece: an exchange gives each rank some heads of the whole sequence, and another brings the
    results back (Jacobs 2023, DeepSpeed-Ulysses).

    Where the ranks do not divide the key heads, each of these is repeated, as few times as make them divide: the query
    heads divide by both counts, so those of a rank find their keys there. Gradients of the copies are added by
    autograd.
    """

    def __init__(self, group: dist.ProcessGroup, attend: CoreAttention) -> None:
        super().__init__()
        self.group, self.core = group, attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        ranks, heads = self.group.size(), q.shape[1]
        check(documents, q.shape[2] * ranks)
        if heads % ranks:
            raise ConfigError(
                f"{heads} query heads of a rank do not divide over context = {ranks} by all-to-all",
                "allowed: a context that divides them, or context.method = ring",
            )
        copies = ranks // gcd(k.shape[1], ranks)
        if copies > 1:
            k, v = (tensor.repeat_interleave(copies, dim=1) for tensor in (k, v))
        split = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]  # (batch, ranks, heads of one, piece, size)
        counts = [tensor.shape[2] for tensor in split]
        received = all_to_all(torch.cat(split, dim=2).movedim(1, 0), self.group)
        whole = received.movedim(0, 2).flatten(2, 3)  # (batch, heads of this rank, sequence, size)
        mixed = self.core(*whole.split(counts, dim=1), documents)
        returned = all_to_all(mixed.unflatten(2, (ranks, -1)).movedim(2, 0), self.group)
        return returned.movedim(0, 1).flatten(1, 2)


def check(documents: Tensor | None, sequence: int) -> None:
    if documents is not None and documents.shape[1] != sequence:
        raise ValueError(f"documents of {documents.shape[1]} tokens; a piece needs those of the whole {sequence}")
