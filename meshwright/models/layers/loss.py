"""The head and its loss in one module: (hidden, labels) -> (sum of token losses, number of valid tokens).

The sum is not divided here. The step divides once, by the number of valid tokens of the global batch (trainer/step.py),
so that ranks and micro-steps with different numbers of valid tokens are weighted as in one process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import IGNORE_INDEX


class HeadLoss(nn.Module):
    """The output projection and the cross-entropy loss."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden).flatten(0, -2)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(wide, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        return total, valid_tokens(labels)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def valid_tokens(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()
