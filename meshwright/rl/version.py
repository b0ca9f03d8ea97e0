"""Policy versions: which weights generated a rollout, and whether they belong to the history of the run. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_TIMELINES = 100_000
"""Limit of the timelines in an untrusted record."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """The weights after `step` optimizer steps, on a timeline. Every attempt begins a timeline of its own, with its
    number: steps that an attempt repeats after a restart are other versions than those that were lost.
    """

    timeline: int
    step: int

    def __str__(self) -> str:
        return f"{self.timeline}.{self.step}"

    @classmethod
    def from_json(cls, value: Any) -> PolicyVersion:
        """Raises ValueError for a value that no run writes."""
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 <= n < 2**53 for n in value):
            raise ValueError("a policy version is not [timeline, step]")
        return cls(*value)

    def to_json(self) -> list[int]:
        return [self.timeline, self.step]


@dataclass(frozen=True)
class PolicyLineage:
    """The timelines of a run, each with the step at which the next one continued."""

    ended: tuple[tuple[int, int], ...]
    """(timeline, last step) of the timelines before the current one; both increase"""
    timeline: int
    """the current timeline"""

    @classmethod
    def begin(cls, timeline: int) -> PolicyLineage:
        """The lineage of a run that starts at step 0."""
        return cls((), timeline)

    def resume(self, timeline: int, step: int) -> PolicyLineage:
        """The lineage after a new attempt has resumed from the checkpoint of `step`: versions after it are lost."""
        earlier = [(before, min(last, step)) for before, last in (*self.ended, (self.timeline, step))]
        kept = [entry for number, entry in enumerate(earlier) if number == 0 or entry[1] > earlier[number - 1][1]]
        return PolicyLineage(tuple(kept), timeline)

    def version(self, step: int) -> PolicyVersion:
        """The version of a step on this lineage."""
        return PolicyVersion(next((timeline for timeline, last in self.ended if step <= last), self.timeline), step)

    def contains(self, version: PolicyVersion) -> bool:
        """Whether a version belongs to the history of the current weights."""
        return self.version(version.step) == version

    def to_json(self) -> dict[str, Any]:
        return {"ended": [list(entry) for entry in self.ended], "timeline": self.timeline}

    @classmethod
    def from_json(cls, value: Any) -> PolicyLineage:
        """Raises ValueError for a value that no run writes."""
        if not isinstance(value, dict) or not isinstance(entries := value.get("ended"), list):
            raise ValueError("the lineage of policies is not a record")
        if len(entries) > MAX_TIMELINES:
            raise ValueError("the lineage of policies is too long")
        versions = [PolicyVersion.from_json(entry) for entry in entries]
        timeline = value.get("timeline")
        if type(timeline) is not int or timeline < 0:
            raise ValueError("the timeline of policies is not a number")
        return cls(tuple((version.timeline, version.step) for version in versions), timeline)
