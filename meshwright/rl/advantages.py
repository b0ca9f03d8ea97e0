"""The advantages of a group's rollouts, and the importance weights of their tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config.rl import RLConfig
from meshwright.rl.rollout import LogProbs, Rollout, RolloutGroup

EPSILON = 1e-6
"""Added to the standard deviation of rewards, which is zero if all of them are equal."""


def group_advantages(rewards: Sequence[float], config: RLConfig) -> LogProbs:
    """Returns the advantage of every rollout of a group: its reward relative to the mean of the group. GRPO divides it
    by the sample standard deviation, unless `scale_rewards` is off.
    """
    values = np.asarray(rewards, np.float64)
    advantages: LogProbs = values - values.mean()
    if config.objective == "grpo" and config.scale_rewards and len(values) > 1:
        advantages = advantages / (values.std(ddof=1) + EPSILON)
    return advantages


def importance_weights(rollout: Rollout, config: RLConfig) -> LogProbs:
    """Returns min(p / q, cap) of every token, with the probability p of the scoring pass and q of the sampler
    (truncated importance sampling); 1 without a cap.
    """
    if not config.importance_cap:
        return np.ones(len(rollout.tokens))
    difference = rollout.logprobs - rollout.sampler_logprobs
    # the truncation comes first: the exponential of a large difference would overflow
    weights: LogProbs = np.exp(np.minimum(difference, np.log(config.importance_cap)))
    return weights


@dataclass(frozen=True)
class LogProbMismatch:
    """How far the log-probabilities of the generators' samplers are from those of the scoring pass, over a step."""

    tokens: int
    mean_difference: float
    """mean of |scored - sampler|"""
    max_difference: float
    kl: float
    """estimate of KL(sampler || scored), which is never negative"""
    mean_weight: float
    """mean of the truncated importance weights"""
    truncated_share: float
    """share of the tokens whose importance weight is truncated"""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], config: RLConfig) -> LogProbMismatch:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scored = concatenate([rollout.logprobs for rollout in rollouts])
        sampled = concatenate([rollout.sampler_logprobs for rollout in rollouts])
        if not len(scored):
            return cls(0, 0.0, 0.0, 0.0, 1.0, 0.0)
        difference = scored - sampled
        cap = config.importance_cap
        weights = concatenate([importance_weights(rollout, config) for rollout in rollouts])
        truncated = difference > np.log(cap) if cap else np.zeros(len(difference), bool)
        return cls(
            len(difference),
            float(np.abs(difference).mean()),
            float(np.abs(difference).max()),
            float((np.expm1(np.minimum(difference, 700.0)) - difference).mean()),
            float(weights.mean()),
            float(truncated.mean()),
        )

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def concatenate(arrays: Sequence[LogProbs]) -> NDArray[np.float64]:
    return np.concatenate(arrays) if arrays else np.zeros(0)
