"""The log-probabilities of tokens: one function for the learner and for the scoring pass of a generator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.base.config import IGNORE_INDEX


def token_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-probability of each label, of the shape of `labels`; 0 where a label is IGNORE_INDEX. The logits
    may be sharded over the vocabulary, within torch's `loss_parallel`.
    """
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    losses = F.cross_entropy(wide, labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX)
    return -losses.view(labels.shape)
