"""What the queue remembers of a record, and what it hands to the learner and to generators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.base.history.rollout_counts import Amount
from meshwright.rl.log.interface import LogPosition
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.rollout import RolloutGroup
from meshwright.rl.version import PolicyVersion

Verdict = Literal["accepted", "duplicate", "stale", "lost_timeline", "not_permitted", "invalid"]


@dataclass(frozen=True)
class GroupHeader:
    """A group without its arrays."""

    group: int
    version: PolicyVersion
    prompt_id: int
    rewards: tuple[float, ...]
    """NaN if a reward could not be computed"""
    tokens: tuple[int, ...]
    """generated tokens of each rollout"""
    failed: bool
    position: LogPosition
    """where its record begins in the log"""

    @classmethod
    def of(cls, group: RolloutGroup, position: LogPosition) -> GroupHeader:
        rewards = tuple(rollout.reward for rollout in group.rollouts)
        tokens = tuple(len(rollout.tokens) for rollout in group.rollouts)
        return cls(group.group, group.version, group.prompt_id, rewards, tokens, group.failed, position)

    @property
    def amount(self) -> Amount:
        return Amount(len(self.tokens), sum(self.tokens))

    def left_out(self, dynamic_sampling: bool) -> str:
        """The cause for which no step trains on the group, or an empty string. It depends on its content only."""
        if self.failed:
            return "failed"
        return "no_signal" if dynamic_sampling and len(set(self.rewards)) == 1 else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "version": self.version.to_json(),
            "prompt_id": self.prompt_id,
            "rewards": [reward if math.isfinite(reward) else None for reward in self.rewards],
            "tokens": list(self.tokens),
            "position": self.position.to_json(),
        }


@dataclass(frozen=True)
class StepBatch:
    """The groups of a step, in the order of their numbers."""

    step: int
    groups: tuple[GroupHeader, ...]
    dropped: tuple[tuple[GroupHeader, str], ...]
    """the groups between them that are left out, each with its cause: no_signal or failed"""
    cursor: RolloutCursor
    """the cursor after the step, which the checkpoint of that state contains"""

    def staleness_of(self, header: GroupHeader) -> int:
        """By how many steps the policy of a group is older than the one that trains on it."""
        return self.step - header.version.step

    @property
    def staleness(self) -> int:
        """That of the oldest group."""
        return max(self.staleness_of(header) for header in self.groups)

    @property
    def positions(self) -> list[LogPosition]:
        """Where the records of the groups begin in the log, in the order in which the step trains on them."""
        return [header.position for header in self.groups]

    def to_json(self) -> dict[str, Any]:
        """The record of the step, without the cursor."""
        return {
            "step": self.step,
            "groups": [{**header.to_json(), "staleness": self.staleness_of(header)} for header in self.groups],
            "dropped": [{**header.to_json(), "cause": cause} for header, cause in self.dropped],
        }


@dataclass(frozen=True)
class Assignment:
    """What a generator shall generate."""

    group: int
    version: PolicyVersion
    prompt_id: int


@dataclass(frozen=True)
class Receipt:
    """The answer to a group that a generator has sent. A group that is not_permitted or invalid is not in the log."""

    group: int
    version: PolicyVersion
    verdict: Verdict
    position: LogPosition | None = None
    reason: str = ""
    """why the group is not_permitted or invalid"""
