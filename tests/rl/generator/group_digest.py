"""Prints the digest of an encoded group; a test runs it in two processes."""

from __future__ import annotations

import hashlib

import torch

from meshwright.rl.generator.group import GroupPolicies, build_group
from meshwright.rl.generator.sampling import SamplingSettings
from meshwright.rl.generator.scoring import MicroBatchShape
from meshwright.rl.version import PolicyVersion
from tests.kit.small_policies import PROMPT, family_policy


def digest() -> str:
    torch.set_num_threads(1)
    policies = GroupPolicies(family_policy(), family_policy(seed=1))
    reward = lambda completions: ([float(len(c.tokens)) for c in completions], "")  # noqa: E731
    settings, shape = SamplingSettings(6, 0.8, frozenset({9, 40})), MicroBatchShape(4, 12)
    group = build_group(policies, 7, 3, PolicyVersion(1, 2), PROMPT, 8, settings, shape, 0, reward)
    return hashlib.sha256(group.encode()).hexdigest()
