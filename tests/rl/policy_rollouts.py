"""Random rollouts for tests of the objective: rewards, log-probabilities and lengths that differ."""

from __future__ import annotations

import math

import numpy as np
import torch

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.config.rl import RLConfig
from meshwright.core.data.loader import MicroBatch
from meshwright.rl.rollout import Rollout, RolloutGroup
from meshwright.rl.rows import PolicyRows, group_rows
from meshwright.rl.version import PolicyVersion


def random_groups(count: int, size: int, sequence: int, vocab: int, seed: int = 0) -> list[RolloutGroup]:
    """Groups whose log-probabilities are near those of a model with small weights, so that ratios are near one: some
    are clipped on either side, and some are not.
    """
    draws = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        prompt = draws.integers(0, vocab, draws.integers(1, sequence // 2)).astype(np.int32)
        rollouts = []
        for _ in range(size):
            length = int(draws.integers(1, sequence - len(prompt) + 1))
            old = -math.log(vocab) + 0.4 * draws.standard_normal(length)
            sampled, reference = old + 0.6 * draws.standard_normal((2, length))
            tokens = draws.integers(0, vocab, length).astype(np.int32)
            rollouts.append(Rollout(tokens, sampled, old, reference, float(draws.normal())))
        groups.append(RolloutGroup(number, number, PolicyVersion(1, 0), prompt, tuple(rollouts)))
    return groups


def random_rows(config: RLConfig, count: int, sequence: int, vocab: int) -> PolicyRows:
    """The rows of `count` rollouts, in groups of four."""
    return group_rows(random_groups(count // 4, 4, sequence, vocab), config, sequence, np.float64)


def micro_batches(rows: PolicyRows, micro: int, coordinate: int = 0, replicas: int = 1) -> list[MicroBatch]:
    """The micro-batches of a data-parallel rank."""
    local = len(rows) // replicas
    batches = []
    for start in range(coordinate * local, (coordinate + 1) * local, micro):
        part = slice(start, start + micro)
        arrays = (rows.tokens[part], rows.labels[part], rows.values[part])
        count = int((rows.labels[part] != IGNORE_INDEX).sum())
        batches.append(MicroBatch(tuple(torch.from_numpy(array) for array in arrays), count))
    return batches
