"""A group has the completions, their log-probabilities under policy and reference, and their rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.rl.generator.group import GroupPolicies, build_group
from meshwright.rl.generator.sampling import SamplingSettings
from meshwright.rl.generator.scoring import MicroBatchShape, score
from meshwright.rl.rollout import RolloutGroup
from meshwright.rl.version import PolicyVersion
from tests.kit.small_policies import PROMPT, family_policy

SETTINGS, SHAPE = SamplingSettings(6, 0.8, frozenset({9, 40})), MicroBatchShape(2, 16)


def lengths(completions):
    return [float(len(completion.tokens)) for completion in completions], ""


def group_with(reward, reference: bool = True) -> RolloutGroup:
    policies = GroupPolicies(family_policy(), family_policy(seed=1) if reference else None)
    return build_group(policies, 12, 3, PolicyVersion(1, 2), PROMPT, 4, SETTINGS, SHAPE, 0, reward, "g0")


def test_group_has_scores_of_policy_and_reference():
    group = group_with(lengths)
    assert (group.group, group.prompt_id, group.version) == (12, 3, PolicyVersion(1, 2))
    assert group.prompt.tolist() == PROMPT
    assert group.generator == "g0"
    assert not group.failed
    completions = [rollout.tokens for rollout in group.rollouts]
    for name, seed in (("logprobs", 0), ("reference_logprobs", 1)):
        scored = score(family_policy(seed=seed), PROMPT, completions, SHAPE, SETTINGS.temperature)
        for rollout, expected in zip(group.rollouts, scored, strict=True):
            assert getattr(rollout, name).tobytes() == expected.tobytes()
    for rollout in group.rollouts:
        assert rollout.reward == len(rollout.tokens)
        assert np.abs(rollout.sampler_logprobs - rollout.logprobs).max() < 1e-4
    decoded = RolloutGroup.decode(group.encode())
    assert decoded.encode() == group.encode()


def test_group_without_a_reference_has_no_reference_logprobs():
    assert all(not len(rollout.reference_logprobs) for rollout in group_with(lengths, reference=False).rollouts)


@pytest.mark.parametrize(
    ("reward", "failure"),
    [
        (lambda _: ([], "timed out after 10 s"), "timed out after 10 s"),
        (lambda _: ([1.0], ""), "the reward returned 1 numbers for 4 completions"),
        (lambda _: ([1.0, math.nan, 0.0, 0.0], ""), "the reward of rollout 1 is not finite"),
    ],
)
def test_failed_reward_is_recorded_with_the_group(reward, failure):
    group = group_with(reward)
    assert group.failed
    assert group.failure == failure
    assert RolloutGroup.decode(group.encode()).failed
