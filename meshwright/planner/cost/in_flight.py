"""What a rank of a pipeline holds at the instants of its schedule that may be its fullest; torch-free.

At an instant one pass is under way. Of each stage of the rank: how many micro-batches wait for their backward pass (the
one under way counts), how many of these have the first part of it behind them, how many are through, and whether the
stage has gradients.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, cached_property

from meshwright.topology.schedule_orders import Action, action_orders, flatten_actions
from meshwright.topology.schedules import SCHEDULES


@dataclass(frozen=True)
class SchedulePoint:
    what: str
    """F, B, I or W"""
    stage: int
    """of the rank's own, from 0"""
    live: tuple[int, ...]
    """micro-batches by stage"""
    halfway: tuple[int, ...]
    """of these, between I and W"""
    through: tuple[int, ...]
    """micro-batches that have all of it behind them"""

    @cached_property
    def graded(self) -> tuple[bool, ...]:
        """Stages that an earlier pass left gradients of."""
        return tuple(count > 0 for count in self.through)


@cache
def peak_candidates(kind: str, ranks: int, micros: int, each: int, place: int) -> tuple[SchedulePoint, ...]:
    """The fullest of each pass of each stage, of one rank; without a pipeline, of the only one."""
    if ranks == 1:
        return alone(1, micros)
    if SCHEDULES[kind].single_stage:
        return alone(micros if SCHEDULES[kind].all_forward_first else min(micros, ranks - place), micros)
    fewer = representative_micro_batches(ranks, micros)
    passes: defaultdict[tuple[str, int], list[SchedulePoint]] = defaultdict(list)
    for instant in schedule_points(kind, ranks, fewer, each, place):
        passes[instant.what, instant.stage].append(instant)
    found = {max(group, key=key): None for group in passes.values() for key in (most_live, most_halfway, most_sent)}
    return tuple(later(instant, micros - fewer) for instant in found)


def most_live(instant: SchedulePoint) -> tuple[int, int, int]:
    """What blocks keep weighs most, unless they are recomputed."""
    return sum(instant.live), sum(instant.halfway), sum(instant.through)


def most_halfway(instant: SchedulePoint) -> tuple[int, int]:
    """Gradients that wait are about half of what blocks keep."""
    return 2 * sum(instant.live) + sum(instant.halfway), sum(instant.through)


def most_sent(instant: SchedulePoint) -> tuple[int, int]:
    """Where little else is kept, inputs and outputs are what is left."""
    return sum(instant.live) + 2 * sum(instant.through) + sum(instant.halfway), sum(instant.live)


def alone(live: int, micros: int) -> tuple[SchedulePoint, ...]:
    """One stage, backward in one part. With as many in flight as there are, the first backward pass finds no gradients,
    and the second one micro-batch less.
    """
    if micros > live:
        return tuple(SchedulePoint(what, 0, (live,), (0,), (micros - live,)) for what in "FB")
    full = tuple(SchedulePoint(what, 0, (live,), (0,), (0,)) for what in "FB")
    return full if live == 1 else (*full, SchedulePoint("B", 0, (live - 1,), (0,), (1,)))


def representative_micro_batches(ranks: int, micros: int) -> int:
    """The fewest micro-batches of the same kind of rounds: later rounds repeat the third."""
    rounds = max(1, micros // ranks)
    return micros if rounds < 4 else 3 * (micros // rounds)


def later(instant: SchedulePoint, more: int) -> SchedulePoint:
    """The same so many micro-batches later, where the schedule is in full course."""
    if not more or not all(instant.through):
        return instant
    return replace(instant, through=tuple(count + more for count in instant.through))


def schedule_points(kind: str, ranks: int, micros: int, each: int, place: int) -> list[SchedulePoint]:
    order = actions(kind, ranks, micros, each)[place]
    stages = sorted({action.stage for action in order})
    split = {(action.stage, action.micro_batch) for action in order if action.op == "I"}
    live, halfway, through = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    found = []
    for action in order:
        stage = stages.index(action.stage)
        live[stage] += action.op == "F"
        halfway[stage] -= action.op == "W"
        found.append(SchedulePoint(action.op, stage, tuple(live), tuple(halfway), tuple(through)))
        halfway[stage] += action.op == "I"
        if action.op == "W" or (action.op == "B" and (action.stage, action.micro_batch) not in split):
            live[stage] -= 1
            through[stage] += 1
    return found


@cache
def actions(kind: str, ranks: int, micros: int, each: int) -> list[list[Action]]:
    """Of every rank."""
    return [list(flatten_actions(order)) for order in action_orders(kind, ranks, micros, each)]
