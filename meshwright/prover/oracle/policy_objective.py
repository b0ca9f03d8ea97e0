"""The objective of reinforcement learning by its definition: rollouts of groups -> loss and gradient, in one process.

It is compared with `meshwright/rl`, and so uses other formulations: advantages and weights one rollout at a time in
plain Python, log-probabilities by log_softmax, and the clipped objective by cases in place of a minimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.base.config import IGNORE_INDEX, RunConfig
from meshwright.prover.oracle.decoder import Parameters, ReferenceDecoder

STANDARD_DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation of the rewards of a group."""


@dataclass(frozen=True)
class ReferenceRollout:
    """A rollout as plain numbers."""

    prompt: Sequence[int]
    completion: Sequence[int]
    sampled: Sequence[float]
    """log-probabilities of the tokens by the sampler that chose them"""
    scored: Sequence[float]
    """log-probabilities of the tokens under the policy of the rollout, by the learner's forward pass"""
    initial: Sequence[float]
    """log-probabilities of the tokens under the reference policy"""
    reward: float


@dataclass(frozen=True)
class PolicyReference:
    """What the definition gives for a batch."""

    loss: float
    gradients: dict[str, Tensor]
    tokens: int
    clipped_above: int
    """tokens of a positive advantage whose ratio exceeds the upper bound: they have no gradient"""
    clipped_below: int


def policy_reference(
    config: RunConfig,
    parameters: Parameters,
    groups: Sequence[Sequence[ReferenceRollout]],
    dtype: torch.dtype = torch.float64,
    low: torch.dtype | None = None,
) -> PolicyReference:
    """The loss of a global batch, and its gradient, which also has the balance loss of experts. `dtype` is that of the
    parameters, `low` that of matrix products.
    """
    leaves = {
        name: value.detach().to(dtype).requires_grad_(not name.endswith("router.bias"))
        for name, value in parameters.items()
    }
    decoder = ReferenceDecoder(config.model, low)
    rollouts = [(rollout, a) for group in groups for rollout, a in zip(group, advantages(config, group), strict=True)]
    count = sum(len(rollout.completion) for rollout, _ in rollouts)
    total, balance = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
    clipped = [0, 0]
    for rollout, advantage in rollouts:
        row = torch.zeros(1, config.data.sequence, dtype=torch.int64)
        tokens = [*rollout.prompt, *rollout.completion]
        row[0, : len(tokens)] = torch.tensor(tokens)
        result = decoder.forward(leaves, row, torch.full_like(row, IGNORE_INDEX))
        logits = result.logits[0, len(rollout.prompt) - 1 : len(tokens) - 1]
        chosen = torch.tensor(list(rollout.completion))[:, None]
        new = (logits / config.rl.temperature).log_softmax(dim=-1).gather(1, chosen)[:, 0]
        share = 1 / count if config.rl.normalization == "token" else 1 / (len(rollouts) * len(rollout.completion))
        total = total + share * rollout_loss(config, rollout, advantage, new, clipped)
        balance = balance + config.model.router_aux_loss * result.balance.sum().to(dtype) / len(rollouts)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(total + balance, list(trained.values()), materialize_grads=True)
    return PolicyReference(float(total.detach()), dict(zip(trained, gradients, strict=True)), count, *clipped)


def advantages(config: RunConfig, group: Sequence[ReferenceRollout]) -> list[float]:
    """The rewards of a group less their mean; GRPO divides by the sample standard deviation."""
    rewards = [rollout.reward for rollout in group]
    mean = math.fsum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    if config.rl.objective != "grpo" or not config.rl.scale_rewards:
        return centered
    variance = math.fsum(value**2 for value in centered) / (len(rewards) - 1)
    return [value / (math.sqrt(variance) + STANDARD_DEVIATION_FLOOR) for value in centered]


def rollout_loss(
    config: RunConfig, rollout: ReferenceRollout, advantage: float, new: Tensor, clipped: list[int]
) -> Tensor:
    """The sum over the tokens of a rollout; counts the clipped ones."""
    rl, total = config.rl, torch.zeros((), dtype=new.dtype)
    low, high = 1 - rl.clip, 1 + (rl.clip_high if rl.clip_high is not None else rl.clip)
    for index, logprob in enumerate(new):
        weight = 1.0
        if rl.importance_cap:
            weight = min(math.exp(rollout.scored[index] - rollout.sampled[index]), rl.importance_cap)
        if rl.objective == "policy_gradient":
            loss = -advantage * logprob
        else:
            ratio = (logprob - rollout.scored[index]).exp()
            above, below = float(ratio.detach()) > high, float(ratio.detach()) < low
            if advantage > 0 and above:
                loss, clipped[0] = -advantage * high * torch.ones_like(ratio), clipped[0] + 1
            elif advantage < 0 and below:
                loss, clipped[1] = -advantage * low * torch.ones_like(ratio), clipped[1] + 1
            else:
                loss = -advantage * ratio
        if rl.kl:
            difference = rollout.initial[index] - logprob
            loss = loss + rl.kl * (difference.exp() - difference - 1)
        total = total + weight * loss
    return total
