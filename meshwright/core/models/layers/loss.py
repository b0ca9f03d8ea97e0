"""The head and its loss in one module: (hidden, labels) -> (sum of token losses, number of valid tokens).

The sum is not divided here. The step divides once, by the number of valid tokens of the global batch (trainer/step.py),
so that ranks and micro-steps with different numbers of valid tokens are weighted as in one process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.kernels.cross_entropy import CHUNK_BYTES, linear_cross_entropy


class HeadLoss(nn.Module):
    """The output projection and the cross-entropy loss. With a soft cap, logits are cap * tanh(logits / cap)."""

    fused = False
    """whether the logits exist for one chunk of tokens only, see `use_fused_loss`"""
    chunk_bytes = CHUNK_BYTES
    """the most bytes of the logits of a chunk"""
    fusable = True
    """whether the loss is a sum of cross-entropies, which can be fused with the projection"""

    def __init__(self, width: int, vocab: int, cap: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        self.cap = cap

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            total = linear_cross_entropy(
                hidden, self.weight, labels, IGNORE_INDEX, self.cap, chunk_bytes=self.chunk_bytes
            )
            return total, valid_tokens(labels)
        logits = self.logits(hidden).flatten(0, -2)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(wide, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        return total, valid_tokens(labels)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight)
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()


def valid_tokens(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def use_fused_loss(model: nn.Module, saves_memory: bool = False) -> None:
    """Lets the heads of a model compute projection and loss together, in chunks of tokens; those of a model that saves
    memory by activation checkpointing are half as large.
    """
    for module in model.modules():
        if isinstance(module, HeadLoss) and module.fusable:
            module.fused, module.chunk_bytes = True, CHUNK_BYTES // 2 if saves_memory else CHUNK_BYTES
