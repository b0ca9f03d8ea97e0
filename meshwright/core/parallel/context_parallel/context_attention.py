"""The attention that every seam calls: ring or all-to-all, or the model's own where it is switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from meshwright.core.parallel.context_parallel.all_to_all_attention import AllToAllAttention
from meshwright.core.parallel.context_parallel.attention_call import AttentionCall
from meshwright.core.parallel.context_parallel.ring_attention import RingAttention
from meshwright.core.parallel.context_parallel.sequence_chunks import ContextMethod, SequenceChunks


class ContextAttention:
    """The attention of one model on one rank."""

    def __init__(self, group: dist.ProcessGroup, method: ContextMethod) -> None:
        self.group, self.method = group, method
        self.chunks = SequenceChunks(method, group.size(), group.rank())
        self.compute = RingAttention(group) if method == "ring" else AllToAllAttention(group)
        self.enabled = True
        self.is_custom = False
        """whether the model is a user's, so that its calls are replaced where it makes them"""
        self.implementations: set[str] = set()
        """names under which transformers' attention interface has it"""
        self.observe: Callable[[AttentionCall], None] = lambda _call: None
        """called with every call of the model"""

    def __call__(self, call: AttentionCall) -> Tensor:
        """(batch, heads, local tokens, head size)"""
        self.observe(call)
        return self.compute(call) if self.enabled else call.attend(call.q, call.k, call.v, call.mask)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model computes full sequences by itself, as it does in one process."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True
