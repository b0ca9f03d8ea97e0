"""Recounts every rollout of a run from the log and the batches of its steps, without the code of the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.base.history.rollout_counts import DROP_CAUSES, Amount, RolloutCounts
from meshwright.errors import DataError
from meshwright.rl.log.interface import DamagedRecord, LogPosition, RolloutReader
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.queue.step_batch import StepBatch
from meshwright.rl.rollout import RolloutGroup
from meshwright.rl.version import PolicyVersion


@dataclass(frozen=True)
class RolloutFate:
    """What became of the record of a group."""

    position: LogPosition
    group: int
    version: PolicyVersion
    amount: Amount
    fate: str
    """trained, in_flight, or the cause for which it is dropped"""
    step: int | None = None
    """the step that trained it or left it out"""


def recount(log: RolloutReader, cursor: RolloutCursor, batches: Sequence[StepBatch], staleness: int) -> RolloutCounts:
    """Counts the rollouts in the log before a cursor.

    Args:
        log: the rollout log of the run.
        cursor: the cursor of a checkpoint.
        batches: the batch of every step that led to it, from step 0, without steps of lost timelines.
        staleness: the bound of the run.

    Raises:
        DataError: a step breaks a rule: it trains a group twice, out of order, too late or without its record.
    """
    totals = dict.fromkeys(("trained", "in_flight", *DROP_CAUSES), Amount())
    generated = Amount()
    for fate in trace_rollouts(log, cursor, batches, staleness):
        generated += fate.amount
        totals[fate.fate] += fate.amount
    return RolloutCounts(generated, totals.pop("trained"), totals.pop("in_flight"), totals)


def trace_rollouts(
    log: RolloutReader, cursor: RolloutCursor, batches: Sequence[StepBatch], staleness: int
) -> Iterator[RolloutFate]:
    """What became of every record in the log before a cursor, as soon as it is known. Arguments as in `recount`."""
    if [batch.step for batch in batches] != list(range(cursor.step)):
        raise DataError(f"expected the batches of {cursor.step} steps, found {len(batches)} that are not those")
    waiting: dict[int, tuple[LogPosition, RolloutGroup]] = {}
    frontier, steps_done = 0, 0
    for record in log.scan():
        if record.position >= cursor.position:
            break
        while steps_done < len(batches) and batches[steps_done].cursor.position <= record.position:
            frontier, fates = finish_step(batches[steps_done], frontier, waiting, staleness)
            yield from fates
            steps_done += 1
        if isinstance(record, DamagedRecord):
            raise DataError(f"rollout log, {record.position}: {record.reason}", "expected a log without damage")
        group = RolloutGroup.decode(record.payload)
        if not cursor.lineage.contains(group.version):
            cause = "lost_timeline"
        elif steps_done - group.version.step > staleness:
            cause = "stale"
        elif group.group < frontier or group.group in waiting:
            cause = "duplicate"
        else:
            waiting[group.group] = (record.position, group)
            continue
        yield fate_of(record.position, group, cause)
    for batch in batches[steps_done:]:
        frontier, fates = finish_step(batch, frontier, waiting, staleness)
        yield from fates
    in_flight = tuple((number, waiting[number][0]) for number in sorted(waiting))
    if (frontier, in_flight) != (cursor.frontier, cursor.in_flight):
        expected = f"frontier {frontier} and {len(in_flight)} groups in flight"
        found = f"frontier {cursor.frontier} and {len(cursor.in_flight)}"
        raise DataError(f"cursor of step {cursor.step}: expected {expected} or other records of them, found {found}")
    for position, group in waiting.values():
        yield fate_of(position, group, "in_flight")


def finish_step(
    batch: StepBatch, frontier: int, waiting: dict[int, tuple[LogPosition, RolloutGroup]], staleness: int
) -> tuple[int, list[RolloutFate]]:
    """Removes the groups that a step consumes, and those that are then too old; returns the frontier after it."""
    consumed = {header.group: (header.position, "trained") for header in batch.groups}
    consumed |= {header.group: (header.position, cause) for header, cause in batch.dropped}
    after = frontier + len(batch.groups) + len(batch.dropped)
    where = f"step {batch.step}"
    if sorted(consumed) != list(range(frontier, after)) or batch.groups[-1].group != after - 1:
        raise DataError(f"{where}: expected the groups from {frontier} to {after - 1}, found {sorted(consumed)}")
    fates = []
    for number, (position, fate) in consumed.items():
        found, group = waiting.pop(number, (None, None))
        if group is None or found != position:
            raise DataError(f"{where}: expected the record of group {number} at {found}, found it at {position}")
        right = {"trained": not group.failed, "failed": group.failed, "no_signal": not group.has_signal}
        if not right.get(fate, False):
            raise DataError(f"{where}: group {number} is {fate}, which its rewards contradict")
        if not 0 <= batch.step - group.version.step <= staleness:
            raise DataError(f"{where}: group {number} of policy version {group.version} exceeds the staleness bound")
        fates.append(fate_of(position, group, fate, batch.step))
    for number, (position, group) in list(waiting.items()):
        if batch.step + 1 - group.version.step > staleness:
            fates.append(fate_of(position, group, "stale"))
            del waiting[number]
    return after, fates


def fate_of(position: LogPosition, group: RolloutGroup, fate: str, step: int | None = None) -> RolloutFate:
    return RolloutFate(position, group.group, group.version, Amount(len(group.rollouts), group.tokens), fate, step)
