"""Reads which groups of rollouts each step of a run consumed, from the untrusted events of rank 0. Torch-free.

A step that several attempts ran counts once: the last attempt that completed it, unless a later attempt resumed from a
checkpoint before it, so that its timeline is lost. A fork takes no rollout of the timelines before it, and its lineage
does not have them; the steps that were trained on them still led to its weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.history.event_tail import EventTail
from meshwright.base.history.rollout_counts import RolloutCounts
from meshwright.base.records.events import Event
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.untrusted_records import bounded_object, natural_number, parse_event
from meshwright.rl.log.interface import LogPosition
from meshwright.rl.version import PolicyLineage, PolicyVersion

LEFT_OUT = ("no_signal", "failed")
"""The causes for which a step consumes a group without training on it."""
KINDS = tuple(f'{{"kind":"{kind}",'.encode() for kind in ("rollouts", "step", "start"))
"""How the lines begin that are read."""


@dataclass(frozen=True)
class ConsumedGroup:
    """A group that a step trains on, or leaves out."""

    group: int
    version: PolicyVersion
    fate: str
    """trained, or the cause for which it is left out"""
    place: int = -1
    """where it is in the batch of the step, counted in groups; -1 if it is left out"""
    prompt_id: int = -1
    position: LogPosition | None = None
    """where its record begins in the rollout log; None if it is left out"""


@dataclass(frozen=True)
class RolloutStep:
    """The `rollouts` record of a step in one attempt."""

    attempt: int
    step: int
    first: int
    """first group that it consumes"""
    frontier: int
    """first group that it does not consume"""
    log: LogPosition
    """end of the log when its batch was formed"""
    groups: tuple[ConsumedGroup, ...] = ()
    """the groups that it consumes, in the order of their numbers; empty if they were not asked for"""
    counts: RolloutCounts | None = None

    @property
    def after(self) -> PolicyVersion:
        """The version of the policy after the step."""
        return PolicyVersion(self.attempt, self.step + 1)


@dataclass
class RolloutSteps:
    """The steps of a run that train on rollouts."""

    lineage: PolicyLineage | None = None
    """the timelines of whose rollouts the newest attempt that has begun a step may take"""
    lineages: dict[int, PolicyLineage] = field(default_factory=dict)
    """attempt -> the same of each attempt"""
    history: PolicyLineage | None = None
    """the timelines that led to the newest weights, those before forks too"""
    begun: dict[tuple[int, int], RolloutStep] = field(default_factory=dict)
    """(step, attempt) -> the record of the step when its batch was formed"""
    completed: set[tuple[int, int]] = field(default_factory=set)
    """(step, attempt) of the steps that were completed"""
    starts: dict[int, Event] = field(default_factory=dict)
    """attempt -> its start record"""

    def is_lost(self, step: RolloutStep) -> bool:
        """Whether a later attempt resumed from a checkpoint before the step."""
        return self.history is not None and not self.history.contains(step.after)

    def counted(self) -> list[RolloutStep]:
        """The completed steps on the lineage, in order."""
        found = {
            step.step: step
            for key, step in sorted(self.begun.items())
            if key in self.completed and not self.is_lost(step)
        }
        return list(found.values())

    def lineages_of(self, counted: Sequence[RolloutStep]) -> list[PolicyLineage | None]:
        """The lineage of every counted step, and that of the step which follows them."""
        return [*(self.lineages.get(step.attempt) for step in counted), self.lineage]

    def attempts_of(self, number: int) -> list[RolloutStep]:
        """Every record of a step, that of the oldest attempt first."""
        return [step for (step_number, _), step in sorted(self.begun.items()) if step_number == number]


def read_rollout_steps(folder: RunFolder, wanted: Callable[[int, int, int], bool]) -> RolloutSteps:
    """Reads the events of rank 0. A record that no run writes is missing.

    Args:
        folder: the run folder.
        wanted: (step, first group, frontier) -> whether the groups of the step are kept.
    """
    steps = RolloutSteps()
    for line in EventTail(folder.events(0)).new_lines():
        event = parse_event(line) if line.startswith(KINDS) else None
        if event is None:
            continue
        attempt, step = natural_number(event.get("attempt")), natural_number(event.get("step"))
        if attempt is None:
            continue
        if event["kind"] == "start":
            steps.starts[attempt] = bounded_object(event)
        elif step is not None and event["kind"] == "step":
            steps.completed.add((step, attempt))
        elif step is not None:
            try:
                lineage = PolicyLineage.from_json(event.get("lineage"))
                if lineage.timeline != attempt:
                    continue
                steps.begun[step, attempt] = parse_step(event, step, attempt, wanted)
            except (ValueError, TypeError, IndexError):
                continue
            steps.lineage = steps.lineages[attempt] = lineage
    steps.completed &= steps.begun.keys()
    if steps.lineage is not None:
        first_steps: dict[int, int] = {}
        for step, attempt in steps.begun:
            first_steps[attempt] = min(step, first_steps.get(attempt, step))
        steps.history = trace_history(steps.lineage, steps.lineages, first_steps)
    return steps


def trace_history(
    newest: PolicyLineage, lineages: Mapping[int, PolicyLineage], first_steps: Mapping[int, int]
) -> PolicyLineage:
    """Joins a lineage with those before its forks.

    Args:
        newest: the lineage of the newest attempt.
        lineages: that of every attempt; the one of a fork begins with its own timeline.
        first_steps: attempt -> its first step.
    """
    ended = deque(newest.ended)
    root = oldest_timeline(newest)
    limit = first_steps.get(root, 0)
    for attempt in sorted(lineages, reverse=True):
        if limit == 0:  # nothing was trained before
            break
        if attempt >= root:
            continue
        before = lineages[attempt]
        kept = [entry for entry in before.ended if entry[1] < limit]
        last = before.ended[len(kept)][0] if len(kept) < len(before.ended) else before.timeline
        if ended and ended[0][1] <= limit:  # the fork has no step that counts
            ended.popleft()
        ended.appendleft((last, limit))
        ended.extendleft(reversed(kept))
        root = min(oldest_timeline(before), attempt)
        limit = min(limit, first_steps.get(root, 0))
    return PolicyLineage(tuple(ended), newest.timeline)


def oldest_timeline(lineage: PolicyLineage) -> int:
    return lineage.ended[0][0] if lineage.ended else lineage.timeline


def parse_step(event: Event, step: int, attempt: int, wanted: Callable[[int, int, int], bool]) -> RolloutStep:
    """The step of a `rollouts` record. Raises ValueError, TypeError or IndexError for one that no run writes."""
    trained, dropped, positions = (event.get(name) for name in ("groups", "dropped", "positions"))
    if not (isinstance(trained, list) and isinstance(dropped, list) and isinstance(positions, list)):
        raise ValueError("a record of rollouts has no groups")
    numbers = [number(row[0]) for row in (*trained, *dropped)]
    first, frontier = min(numbers), max(numbers) + 1
    log = LogPosition.from_json(event.get("log"))
    if not wanted(step, first, frontier):
        return RolloutStep(attempt, step, first, frontier, log)
    groups = [
        ConsumedGroup(
            number(row[0]),
            PolicyVersion.from_json(row[1]),
            "trained",
            place,
            number(row[2]),
            LogPosition.from_json(position),
        )
        for place, (row, position) in enumerate(zip(trained, positions, strict=True))
    ]
    for row in dropped:
        if row[2] not in LEFT_OUT:
            raise ValueError("a group is left out for an unknown cause")
        groups.append(ConsumedGroup(number(row[0]), PolicyVersion.from_json(row[1]), row[2]))
    groups.sort(key=lambda group: group.group)
    counts = RolloutCounts.from_json(event.get("counts"))
    return RolloutStep(attempt, step, first, frontier, log, tuple(groups), counts)


def number(value: Any) -> int:
    natural = natural_number(value)
    if natural is None:
        raise ValueError("the number of a group is out of range")
    return natural
