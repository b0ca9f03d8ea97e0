"""Context parallelism: each rank has chunks of every sequence, and attention alone reaches across chunks.

Both methods are exact. Positions, labels and masks are those of the full sequences.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.attention import CoreAttention
from meshwright.models.rotary import RotaryEmbedding
from meshwright.parallel.context_parallel.all_to_all_attention import AllToAllAttention
from meshwright.parallel.context_parallel.ring_attention import RingAttention
from meshwright.parallel.context_parallel.sequence_chunks import ChunkRotaryEmbedding, ContextMethod, SequenceChunks


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup, method: ContextMethod) -> SequenceChunks:
    """Replaces attention and rotary positions of the model by those of a rank with sequence chunks; returns the chunks
    of this rank.
    """
    chunks = SequenceChunks(method, group.size(), group.rank())
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RotaryEmbedding):
                setattr(module, name, ChunkRotaryEmbedding(child, chunks))
            elif isinstance(child, CoreAttention):
                setattr(module, name, RingAttention(group) if method == "ring" else AllToAllAttention(group, child))
                replaced += 1
    if not replaced:
        raise ConfigError(
            "context parallelism replaces meshwright.models.attention.CoreAttention, and the model has none",
            "try layout.context = 1, or use CoreAttention in the model",
        )
    return chunks
