"""Judges the records of a group of rollouts: trained, dropped for a cause, or in flight. Torch-free.

The rules are those of the queue, derived from the log and the steps alone: the first valid record of a group waits for
its step; later ones are duplicates; those of lost timelines, and those that are too old, are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import DataError
from meshwright.rl.log.interface import DamagedRecord, LogPosition, RolloutReader
from meshwright.rl.lookup.steps import ConsumedGroup, RolloutStep
from meshwright.rl.rollout import InvalidRollout, RolloutGroup, read_header
from meshwright.rl.version import PolicyLineage


@dataclass(frozen=True)
class FoundRecord:
    """A record of a group in the log, and what became of it."""

    position: LogPosition
    group: RolloutGroup
    fate: str
    """trained, in_flight, or the cause for which it is dropped"""
    step: RolloutStep | None = None
    """the step that consumed it, or after which it was too old"""
    consumed: ConsumedGroup | None = None


def judge_records(
    log: RolloutReader,
    number: int,
    counted: Sequence[RolloutStep],
    lineages: Sequence[PolicyLineage | None],
    staleness: int,
) -> tuple[list[dict[str, Any]], list[FoundRecord]]:
    """What became of every record of a group.

    Args:
        log: the rollout log of the run.
        number: the group.
        counted: the completed steps on the lineage, in order, with the groups of those that consume the group.
        lineages: the lineage of every counted step, and of the step that follows them; None if no step has begun.
        staleness: the bound of the run.

    Returns:
        The damaged places of the log, and the records in the order of the log.
    """
    judged: list[FoundRecord] = []
    damaged: list[dict[str, Any]] = []
    waiting: FoundRecord | None = None
    done = 0  # counted steps whose batch was formed before the record was appended
    for record in log.scan():
        if isinstance(record, DamagedRecord):
            damaged.append({"position": record.position.to_json(), "reason": record.reason})
            continue
        try:
            if read_header(record.payload)[0].get("group") != number:
                continue
            group = RolloutGroup.decode(record.payload)
        except ValueError as error:  # an InvalidRollout is one
            damaged.append({"position": record.position.to_json(), "reason": str(InvalidRollout(error))})
            continue
        while done < len(counted) and counted[done].log <= record.position:
            waiting = finish_step(counted[done], waiting, judged, damaged, number, staleness)
            done += 1
            waiting = drop_lost(waiting, lineages[done], judged)
        next_step = counted[done - 1].step + 1 if done else 0
        found = FoundRecord(record.position, group, "in_flight")
        if drop_lost(found, lineages[done], judged) is None:
            continue
        if next_step - group.version.step > staleness:
            judged.append(replace(found, fate="stale", step=counted[done - 1]))
        elif waiting is not None or (done and number < counted[done - 1].frontier):
            judged.append(replace(found, fate="duplicate"))
        else:
            waiting = found
    for step, following in zip(counted[done:], lineages[done + 1 :], strict=True):
        waiting = finish_step(step, waiting, judged, damaged, number, staleness)
        waiting = drop_lost(waiting, following, judged)
    records = [*judged, *([waiting] if waiting is not None else [])]
    return damaged, sorted(records, key=lambda found: found.position)


def drop_lost(
    found: FoundRecord | None, lineage: PolicyLineage | None, judged: list[FoundRecord]
) -> FoundRecord | None:
    """A record, if the next step may take it; one of a lost timeline, or from before a fork, is added to `judged`."""
    if found is None or lineage is None or lineage.contains(found.group.version):
        return found
    judged.append(replace(found, fate="lost_timeline"))
    return None


def finish_step(
    step: RolloutStep,
    waiting: FoundRecord | None,
    judged: list[FoundRecord],
    damaged: list[dict[str, Any]],
    number: int,
    staleness: int,
) -> FoundRecord | None:
    """The record of a group that still waits after a step; one whose fate is known then is added to `judged`."""
    if waiting is None:
        return None
    consumed = next((group for group in step.groups if group.group == number), None)
    if consumed is not None:
        position = consumed.position.to_json() if consumed.position is not None else None
        if any(damage["position"] == position for damage in damaged):  # the step had an earlier record, now damaged
            judged.append(replace(waiting, fate="duplicate"))
            return None
        if consumed.version != waiting.group.version or consumed.position not in (None, waiting.position):
            raise DataError(
                f"step {step.step} of attempt {step.attempt} consumed group {number} of policy version "
                f"{consumed.version} at {consumed.position}, and the rollout log has it of {waiting.group.version} "
                f"at {waiting.position}",
                "the rollout log and the events are not of one run, or a record is damaged",
            )
        judged.append(replace(waiting, fate=consumed.fate, step=step, consumed=consumed))
        return None
    if step.step + 1 - waiting.group.version.step > staleness:
        judged.append(replace(waiting, fate="stale", step=step))
        return None
    return waiting
