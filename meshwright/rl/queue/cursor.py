"""The cursor: what a checkpoint records of the rollouts that its steps have consumed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.base.history.rollout_counts import RolloutCounts
from meshwright.rl.log.interface import START, LogPosition
from meshwright.rl.queue.settings import RolloutQueueError
from meshwright.rl.version import PolicyLineage, PolicyVersion

MAX_GROUPS = 1 << 22
"""Limit of the groups in flight in an untrusted cursor."""
MAX_NUMBER = 1 << 62
FIELDS = {"step", "frontier", "lineage", "position", "counts", "in_flight", "versions"}


@dataclass(frozen=True)
class RolloutCursor:
    """Which groups are consumed, and which records of the log are in flight, after `step` completed steps."""

    step: int
    frontier: int
    """first group that is not consumed"""
    lineage: PolicyLineage
    position: LogPosition
    """end of the log when the batch of the last step was formed: the counts are those of the records before it"""
    counts: RolloutCounts
    in_flight: tuple[tuple[int, LogPosition], ...] = ()
    """(group, position of its record) of the groups after the frontier that wait for their step"""
    versions: tuple[tuple[int, PolicyVersion], ...] = ()
    """policy `fixed`: (first group, version that generates it and those that follow); otherwise empty"""

    @classmethod
    def initial(cls, timeline: int, fixed: bool = False) -> RolloutCursor:
        """The cursor of a run before its first step, whose first attempt has the number `timeline`.

        An attempt that restarts before the first checkpoint begins here: the initial weights are a function of the
        seed, so that what earlier attempts generated from them remains valid.
        """
        lineage = PolicyLineage.begin(timeline)
        versions = ((0, lineage.version(0)),) if fixed else ()
        return cls(0, 0, lineage, START, RolloutCounts(), (), versions)

    def fork(self, timeline: int, fixed: bool) -> RolloutCursor:
        """The cursor of a fork, which begins at the same step and group, and drops what is in flight: other settings
        may have generated it.
        """
        counts = self.counts.drop("lost_timeline", self.counts.in_flight)
        lineage = PolicyLineage.begin(timeline)
        versions = ((self.frontier, lineage.version(self.step)),) if fixed else ()
        return RolloutCursor(self.step, self.frontier, lineage, self.position, counts, (), versions)

    @property
    def policies(self) -> set[PolicyVersion]:
        """The versions that an attempt which resumes from this cursor may need: keep them as long as its checkpoint."""
        return {self.lineage.version(self.step), *(version for _, version in self.versions)}

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "frontier": self.frontier,
            "lineage": self.lineage.to_json(),
            "position": self.position.to_json(),
            "counts": self.counts.to_json(),
            "in_flight": [[group, *position.to_json()] for group, position in self.in_flight],
            "versions": [[first, *version.to_json()] for first, version in self.versions],
        }

    @classmethod
    def from_json(cls, value: Any) -> RolloutCursor:
        """Raises ValueError for a value that no run writes; it may come from an untrusted file."""
        if not isinstance(value, dict) or set(value) != FIELDS:
            raise ValueError("the cursor of the rollouts is not a record of " + ", ".join(sorted(FIELDS)))
        in_flight = [(number, LogPosition.from_json(rest)) for number, rest in entries(value["in_flight"])]
        versions = [(number, PolicyVersion.from_json(rest)) for number, rest in entries(value["versions"])]
        cursor = cls(
            natural(value["step"]),
            natural(value["frontier"]),
            PolicyLineage.from_json(value["lineage"]),
            LogPosition.from_json(value["position"]),
            RolloutCounts.from_json(value["counts"]),
            tuple(in_flight),
            tuple(versions),
        )
        cursor._validate()
        return cursor

    def _validate(self) -> None:
        groups, firsts = [group for group, _ in self.in_flight], [first for first, _ in self.versions]
        if not (increasing(groups) and increasing(firsts)):
            raise ValueError("the groups of a cursor are not in the order of their numbers")
        if (groups and groups[0] < self.frontier) or (firsts and firsts[0] > self.frontier):
            raise ValueError("the groups of a cursor do not begin at its frontier")
        if any(not position < self.position for _, position in self.in_flight):
            raise ValueError("a group is in flight at a position after that of the cursor")
        if any(version.step > self.step or not self.lineage.contains(version) for _, version in self.versions):
            raise ValueError("a policy version of a cursor is not on its lineage")
        rollouts = self.counts.in_flight.rollouts
        if bool(groups) != bool(rollouts) or (groups and rollouts % len(groups)):
            raise ValueError("the rollouts in flight are not those of the groups in flight")


def resume_cursor(
    cursor: RolloutCursor | None, timeline: int, step: int, fixed: bool, fork: bool
) -> tuple[RolloutCursor, PolicyLineage]:
    """The cursor that an attempt begins with, and its lineage. `cursor` is that of the checkpoint, None for step 0."""
    if cursor is None:
        cursor = RolloutCursor.initial(timeline, fixed)
        lineage = cursor.lineage
    else:
        if timeline <= cursor.lineage.timeline:
            message = f"attempt {timeline} resumes from a checkpoint of attempt {cursor.lineage.timeline}"
            raise RolloutQueueError(message, "expected a larger number for every attempt of a run")
        cursor = cursor.fork(timeline, fixed) if fork else cursor
        lineage = cursor.lineage if fork else cursor.lineage.resume(timeline, step)
    if cursor.step != step:
        message = f"an attempt resumes at step {step} with the rollout cursor of step {cursor.step}"
        raise RolloutQueueError(message, "expected the cursor of the checkpoint that the attempt resumes from")
    if fixed != bool(cursor.versions):
        message = f"rl.policy is {'fixed' if fixed else 'newest'}, and the rollout cursor is one of the other policy"
        raise RolloutQueueError(message, "expected the settings of the run that wrote the checkpoint")
    return cursor, lineage


def natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise ValueError("a number of a cursor is out of range")
    return value


def entries(value: Any) -> list[tuple[int, list[Any]]]:
    if not isinstance(value, list) or len(value) > MAX_GROUPS:
        raise ValueError(f"a list of a cursor is not a list of at most {MAX_GROUPS} groups")
    if not all(isinstance(entry, list) and len(entry) == 3 for entry in value):
        raise ValueError("a group of a cursor does not have three numbers")
    return [(natural(entry[0]), entry[1:]) for entry in value]


def increasing(numbers: list[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))
