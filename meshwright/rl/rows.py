"""The rows of a step's batch: rollouts as token ids, labels, and four values per token. Torch-free.

Position t of labels and values belongs to the prediction of token t + 1. Its values are the advantage, the old
log-probability (of the recorded scoring pass), the weight, and the log-probability of the reference policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.config.rl import RLConfig
from meshwright.errors import DataError
from meshwright.rl.advantages import LogProbMismatch, group_advantages, importance_weights
from meshwright.rl.rollout import RolloutGroup, Tokens

ADVANTAGE, OLD_LOGPROB, WEIGHT, REFERENCE_LOGPROB = range(4)
COLUMNS = 4
"""The values of a token."""
PADDING = 0
"""The token id after the end of a rollout; no label asks for it, and causal attention does not see it."""

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PolicyRows:
    """The rollouts of a step, one per row, in the order of their groups."""

    tokens: Integers
    """of shape (rollouts, sequence)"""
    labels: Integers
    """the next token where it is a generated one, IGNORE_INDEX elsewhere"""
    values: NDArray[np.floating]
    """of shape (rollouts, sequence, 4)"""
    mismatch: LogProbMismatch

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def valid_targets(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


def completion_row(prompt: Tokens, completion: Tokens, sequence: int, where: str = "a rollout") -> tuple[Integers, ...]:
    """Returns the token ids and labels of a rollout, padded to `sequence`. The scoring pass of a generator uses it too,
    so that it computes on the same rows as the learner.
    """
    length = len(prompt) + len(completion)
    if not len(prompt) or length > sequence:
        raise DataError(
            f"{where} has {len(prompt)} prompt tokens and {len(completion)} completion tokens, and data.sequence is "
            f"{sequence}",
            "expected a prompt of at least one token, and both within data.sequence",
        )
    tokens = np.full(sequence, PADDING, np.int64)
    tokens[: len(prompt)], tokens[len(prompt) : length] = prompt, completion
    labels = np.full(sequence, IGNORE_INDEX, np.int64)
    labels[completion_span(prompt, completion)] = completion
    return tokens, labels


def completion_span(prompt: Tokens, completion: Tokens) -> slice:
    """The positions of a row that predict the tokens of the completion."""
    return slice(len(prompt) - 1, len(prompt) + len(completion) - 1)


def group_rows(
    groups: Sequence[RolloutGroup], config: RLConfig, sequence: int, dtype: DTypeLike = np.float32
) -> PolicyRows:
    """Returns the rows of all groups of a step. It needs all of them on every rank: with `normalization = sequence` the
    weight of a token depends on the tokens and rollouts of the global batch.
    """
    count = sum(len(group.rollouts) for group in groups)
    total = sum(group.tokens for group in groups)
    tokens, labels = np.empty((count, sequence), np.int64), np.empty((count, sequence), np.int64)
    values = np.zeros((count, sequence, COLUMNS), dtype)
    row = 0
    for group in groups:
        require_rewards(group)
        advantages = group_advantages([rollout.reward for rollout in group.rollouts], config)
        for index, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True)):
            where = f"rollout {group.rollout_id(index)}"
            tokens[row], labels[row] = completion_row(group.prompt, rollout.tokens, sequence, where)
            weights = importance_weights(rollout, config)
            if config.normalization == "sequence":
                # The step divides by `total`: what is left is a mean over the tokens of each rollout, then over them.
                weights = weights * (total / (count * len(rollout.tokens)))
            of_row = values[row, completion_span(group.prompt, rollout.tokens)]
            of_row[:, ADVANTAGE] = advantage
            of_row[:, OLD_LOGPROB] = rollout.logprobs
            of_row[:, WEIGHT] = weights
            if config.kl:
                if not len(rollout.reference_logprobs):
                    raise DataError(
                        f"{where} has no log-probabilities of the reference policy, and rl.kl = {config.kl}",
                        "expected rollouts that were generated with the same rl.kl, or try rl.kl = 0",
                    )
                of_row[:, REFERENCE_LOGPROB] = rollout.reference_logprobs
            row += 1
    return PolicyRows(tokens, labels, values, LogProbMismatch.of(groups, config))


def require_rewards(group: RolloutGroup) -> None:
    if group.failed:
        why = group.failure or "a reward is not finite"
        raise DataError(
            f"group {group.group} of policy {group.version} has no rewards: {why}",
            "expected groups that the queue has not left out",
        )
