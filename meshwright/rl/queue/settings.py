"""The settings of the rollout queue, and the errors that it raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.errors import DataError, MeshwrightError


class RolloutQueueError(MeshwrightError):
    """A call that does not follow the order of steps, such as a batch of a step that is not the next one."""


class FilterBudgetExceeded(DataError):
    """More groups in a row than `rl.filter_budget` have no signal or no reward."""


@dataclass(frozen=True)
class QueueSettings:
    """What decides which groups a step trains on."""

    group_size: int
    """rollouts per group"""
    groups_per_step: int
    """batch.global / rl.group_size"""
    staleness: int = 0
    """most steps by which the policy of a group may be older than the one that trains on it"""
    policy: Literal["newest", "fixed"] = "newest"
    dynamic_sampling: bool = True
    """whether a group whose rewards are all equal is left out"""
    filter_budget: int = 1000
    """groups left out in a row after which the run stops"""

    @property
    def window(self) -> int:
        """How many groups from the frontier on may be generated: those of the next step and of `staleness` more."""
        return (self.staleness + 1) * self.groups_per_step
