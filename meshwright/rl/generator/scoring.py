"""The scoring pass: log-probabilities of completions by the forward pass of the learner, in the learner's shapes.

A matrix product may round the last bit of a row differently at another position of the batch, and experts process the
rows of all sequences of a batch together. So the pass repeats the micro-batches of the learner: `micro` rows of
`sequence` tokens, with the rows of a group in the order of the group. If `micro` divides the size of a group, a
micro-batch of the learner has the rows of one group, and the pass computes exactly what the learner computes.

A larger micro-batch has the rows of other groups too, which are not known when a group is generated. The pass then has
padding in their place. On CPU with one thread, dense models give the same bits at every row if `sequence` is a multiple
of 8; with other sequences the last rows of a product in float64 differ by one rounding. Models with experts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.base.config import IGNORE_INDEX
from meshwright.rl.generator.policy_model import PolicyModel
from meshwright.rl.logprobs import token_logprobs
from meshwright.rl.rollout import LogProbs, Tokens
from meshwright.rl.rows import PADDING, completion_row


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of the learner's micro-batches."""

    micro: int
    """rows"""
    sequence: int
    """tokens of a row"""


def group_tokens(
    prompt: Sequence[int] | Tokens, completions: Sequence[Tokens], sequence: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of a group, (rollouts, sequence): tokens, and labels. The label of a position is the token after it if
    that belongs to the completion, else IGNORE_INDEX.
    """
    prompt = np.asarray(prompt, np.int32)
    rows = [completion_row(prompt, completion, sequence) for completion in completions]
    return np.stack([tokens for tokens, _ in rows]), np.stack([labels for _, labels in rows])


def score(
    model: PolicyModel,
    prompt: Sequence[int] | Tokens,
    completions: Sequence[Tokens],
    shape: MicroBatchShape,
    temperature: float,
) -> list[LogProbs]:
    """The log-probability of every token of every completion."""
    tokens, labels = group_tokens(prompt, completions, shape.sequence)
    rows: list[NDArray[np.float64]] = []
    for start in range(0, len(completions), shape.micro):
        padded_tokens = np.full((shape.micro, shape.sequence), PADDING, np.int64)
        padded_labels = np.full((shape.micro, shape.sequence), IGNORE_INDEX, np.int64)
        count = min(shape.micro, len(completions) - start)
        padded_tokens[:count] = tokens[start : start + count]
        padded_labels[:count] = labels[start : start + count]
        rows += list(score_micro_batch(model, padded_tokens, padded_labels, temperature)[:count])
    first = len(prompt) - 1
    return [row[first : first + len(completion)] for row, completion in zip(rows, completions, strict=True)]


@torch.no_grad()
def score_micro_batch(
    model: PolicyModel, tokens: NDArray[np.int64], labels: NDArray[np.int64], temperature: float
) -> NDArray[np.float64]:
    """The log-probability of each label of one micro-batch, 0 where there is none."""
    device = next(model.module.parameters()).device
    logits = model.logits(torch.from_numpy(tokens).to(device))
    logprobs = token_logprobs(logits, torch.from_numpy(labels).to(device), temperature)
    return logprobs.double().cpu().numpy()
