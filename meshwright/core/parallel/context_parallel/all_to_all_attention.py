"""All-to-all attention: an exchange gives each rank some heads of full sequences, and another brings the results back.

With C ranks, batch B, H query heads, K key heads, sequence length S, head size D and elements of e bytes, the messages
of one attention call on every rank are

    forward   one all-to-all of B (H + 2 K') (S/C) D e with K' = lcm(K, C), and one of B H (S/C) D e
    backward  the same two

(C - 1)/C of the bytes of an all-to-all cross the wire. Activation checkpointing adds another forward. (Jacobs 2023,
DeepSpeed-Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.parallel.all_to_all import all_to_all
from meshwright.core.parallel.context_parallel.attention_call import AttentionCall
from meshwright.core.parallel.context_parallel.sequence_chunks import require_full_documents
from meshwright.errors import ConfigError


class AllToAllAttention:
    """The attention of a rank with one sequence chunk: the model's own attention, on full sequences of some heads.

    If the ranks do not divide the key heads, each key head is repeated as few times as needed. The query heads divide
    by both numbers, so the queries of a rank find their keys there. Autograd sums the gradients of the repetitions.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, call: AttentionCall) -> Tensor:
        q, k, v = call.q, call.k, call.v
        ranks, heads = self.group.size(), q.shape[1]
        require_full_documents(call.documents, q.shape[2] * ranks)
        if heads % ranks:
            raise ConfigError(
                f"layout.context = {ranks} with context.method = all-to-all does not divide {heads} local query heads",
                "try context.method = ring, or a layout.context that divides them",
            )
        repeats = ranks // gcd(k.shape[1], ranks)
        if repeats > 1:
            k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
        by_rank = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]  # (batch, ranks, heads, chunk, head size)
        heads_per_rank = [tensor.shape[2] for tensor in by_rank]
        received = all_to_all(torch.cat(by_rank, dim=2).movedim(1, 0), self.group)
        full_sequences = received.movedim(0, 2).flatten(2, 3)  # (batch, heads of this rank, sequence, head size)
        mask = call.mask
        if mask is not None and mask.shape[1] > 1:
            mask = mask.chunk(ranks, dim=1)[self.group.rank()]
        full_q, full_k, full_v = full_sequences.split(heads_per_rank, dim=1)
        mixed = call.attend(full_q, full_k, full_v, mask)
        returned = all_to_all(mixed.unflatten(2, (ranks, -1)).movedim(2, 0), self.group)
        return returned.movedim(0, 1).flatten(1, 2)
