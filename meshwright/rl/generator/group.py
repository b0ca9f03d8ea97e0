"""Generates one group: samples the completions of a prompt, scores them, and computes their rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.rl.generator.policy_model import PolicyModel
from meshwright.rl.generator.sampling import Completion, GroupSampler, ModelSampler, SamplingSettings
from meshwright.rl.generator.scoring import MicroBatchShape, score
from meshwright.rl.rollout import LogProbs, Rollout, RolloutGroup, Tokens
from meshwright.rl.version import PolicyVersion

GroupReward = Callable[[Sequence[Completion]], tuple[Sequence[float], str]]
"""The rewards of the completions of a group, and why there are none; the text is empty if there are."""


@dataclass(frozen=True)
class GroupPolicies:
    """The models that generate a group."""

    policy: PolicyModel
    """the policy of the version that the group is assigned; its scoring pass gives the recorded log-probabilities"""
    reference: PolicyModel | None = None
    """the initial weights of the run; None: the objective does not use them"""
    sampler: GroupSampler | None = None
    """samples in place of the policy, such as a server with the same weights"""


def build_group(
    policies: GroupPolicies,
    group: int,
    prompt_id: int,
    version: PolicyVersion,
    prompt: Sequence[int] | Tokens,
    group_size: int,
    settings: SamplingSettings,
    shape: MicroBatchShape,
    seed: int,
    reward: GroupReward,
    generator: str = "",
) -> RolloutGroup:
    """Samples, scores and rewards a group. A reward that fails leaves NaN rewards and the text of the failure."""
    tokens = np.asarray(prompt, np.int32)
    sampler = policies.sampler or ModelSampler(policies.policy)
    completions = sampler.sample_group(tokens.tolist(), group_size, settings, seed, group)
    of_completions = [completion.tokens for completion in completions]
    scored = score(policies.policy, tokens, of_completions, shape, settings.temperature)
    references: list[LogProbs] = [np.empty(0) for _ in completions]
    if policies.reference is not None:
        references = score(policies.reference, tokens, of_completions, shape, settings.temperature)
    rewards, failure = reward(completions)
    if not failure and len(rewards) != len(completions):
        failure = f"the reward returned {len(rewards)} numbers for {len(completions)} completions"
    values = [math.nan] * len(completions) if failure else [float(value) for value in rewards]
    if not failure and not all(map(math.isfinite, values)):
        failure = f"the reward of rollout {[*map(math.isfinite, values)].index(False)} is not finite"
    rollouts = tuple(
        Rollout(completion.tokens, completion.sampler_logprobs, own, reference, value, completion.truncated)
        for completion, own, reference, value in zip(completions, scored, references, values, strict=True)
    )
    return RolloutGroup(group, prompt_id, version, tokens, rollouts, generator, failure)
