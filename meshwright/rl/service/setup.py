"""What the processes of reinforcement learning share: the run, its prompts, and how a policy is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.base.config import Batch, RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.data.stream import Stream
from meshwright.rl.generator.policy_model import PolicyModel
from meshwright.rl.queue.settings import QueueSettings
from meshwright.rl.rewards.reward_function import RewardFunction
from meshwright.rl.tasks.prompt_source import PromptSource

PolicyFactory = Callable[[], PolicyModel]
"""Builds a policy whose weights are replaced by those of a published version."""


@dataclass(frozen=True)
class RolloutSetup:
    """What the rollout service and its generators receive from the process that forks them."""

    config: RunConfig
    batch: Batch
    folder: RunFolder
    prompts: PromptSource
    stream: Stream
    reward: RewardFunction
    make_policy: PolicyFactory
    address: Path
    """the Unix socket of the service, in a folder that only this user can enter"""

    @property
    def groups_per_step(self) -> int:
        return self.batch.global_ // self.config.rl.group_size

    @property
    def vocab(self) -> int:
        """The number of tokens of a built-in model; 0 for a custom one."""
        return self.config.model.vocab if self.config.custom_model.class_ is None else 0

    def prompt_id(self, group: int) -> int:
        """The sample id of the prompt of a group: a function of the seed and the number of the group."""
        return int(self.stream.sample_ids(np.array([group], np.uint64))[0])

    def queue_settings(self) -> QueueSettings:
        rl = self.config.rl
        return QueueSettings(
            rl.group_size, self.groups_per_step, rl.staleness, rl.policy, rl.dynamic_sampling, rl.filter_budget
        )
