"""Micro-batches in flight on a pipeline rank, at the points of its schedule where memory may peak; torch-free.

At each point one action runs. For each stage of the rank, a point counts the micro-batches whose activations are in
memory (including the one of the action), those of them that have input gradients and wait for weight gradients, and
those that are complete.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, cached_property

from meshwright.topology.schedule_orders import Action, action_orders, flatten_actions
from meshwright.topology.schedules import SCHEDULES


@dataclass(frozen=True)
class SchedulePoint:
    """One action of a rank's schedule, with the micro-batches of each of its stages."""

    op: str
    """F, B, I or W"""
    stage: int
    """the index of the stage among the rank's stages"""
    in_flight: tuple[int, ...]
    """by stage, the micro-batches between the start of forward and the end of backward"""
    between_i_and_w: tuple[int, ...]
    """by stage, those of them that have input gradients and wait for weight gradients"""
    completed: tuple[int, ...]
    """by stage, the micro-batches whose backward pass is complete"""

    @cached_property
    def has_gradients(self) -> tuple[bool, ...]:
        """By stage, whether an earlier micro-batch left gradients."""
        return tuple(count > 0 for count in self.completed)


@cache
def peak_candidates(
    kind: str, ranks: int, micro_batches: int, stages_per_rank: int, rank: int
) -> tuple[SchedulePoint, ...]:
    """The points of one pipeline rank at which memory may peak: for each action of each stage the fullest ones. Without
    a pipeline, `ranks` is 1.
    """
    if ranks == 1:
        return single_stage_points(1, micro_batches)
    schedule = SCHEDULES[kind]
    if schedule.single_stage:
        in_flight = micro_batches if schedule.all_forward_first else min(micro_batches, ranks - rank)
        return single_stage_points(in_flight, micro_batches)
    simulated = representative_micro_batches(ranks, micro_batches)
    by_action: defaultdict[tuple[str, int], list[SchedulePoint]] = defaultdict(list)
    for point in schedule_points(kind, ranks, simulated, stages_per_rank, rank):
        by_action[point.op, point.stage].append(point)
    orders = (by_activations, by_deferred_gradients, by_sent_tensors)
    candidates = {max(points, key=order): None for points in by_action.values() for order in orders}
    return tuple(shift(point, micro_batches - simulated) for point in candidates)


def by_activations(point: SchedulePoint) -> tuple[int, int, int]:
    """Orders points by saved activations, which are the largest unless they are recomputed."""
    return sum(point.in_flight), sum(point.between_i_and_w), sum(point.completed)


def by_deferred_gradients(point: SchedulePoint) -> tuple[int, int]:
    """Orders points with gradients that wait for W, which are about half as large as saved activations."""
    return 2 * sum(point.in_flight) + sum(point.between_i_and_w), sum(point.completed)


def by_sent_tensors(point: SchedulePoint) -> tuple[int, int]:
    """Orders points by stage inputs and outputs, which are what remains if everything else is recomputed."""
    return sum(point.in_flight) + 2 * sum(point.completed) + sum(point.between_i_and_w), sum(point.in_flight)


def single_stage_points(in_flight: int, micro_batches: int) -> tuple[SchedulePoint, ...]:
    """The points of a single stage whose backward pass is not split. If all micro-batches are in flight at once, the
    first backward pass finds no gradients, and the second one finds one micro-batch less.
    """
    if micro_batches > in_flight:
        return tuple(SchedulePoint(op, 0, (in_flight,), (0,), (micro_batches - in_flight,)) for op in "FB")
    full = tuple(SchedulePoint(op, 0, (in_flight,), (0,), (0,)) for op in "FB")
    return full if in_flight == 1 else (*full, SchedulePoint("B", 0, (in_flight - 1,), (0,), (1,)))


def representative_micro_batches(ranks: int, micro_batches: int) -> int:
    """The smallest number of micro-batches whose schedule contains every pattern: later rounds repeat the third."""
    rounds = max(1, micro_batches // ranks)
    return micro_batches if rounds < 4 else 3 * (micro_batches // rounds)


def shift(point: SchedulePoint, further: int) -> SchedulePoint:
    """The same point this many micro-batches later, if the pipeline is full by then."""
    if not further or not all(point.completed):
        return point
    return replace(point, completed=tuple(count + further for count in point.completed))


def schedule_points(kind: str, ranks: int, micro_batches: int, stages_per_rank: int, rank: int) -> list[SchedulePoint]:
    """All points of one pipeline rank."""
    actions = rank_actions(kind, ranks, micro_batches, stages_per_rank)[rank]
    stages = sorted({action.stage for action in actions})
    split = {(action.stage, action.micro_batch) for action in actions if action.op == "I"}
    in_flight, between, completed = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    points = []
    for action in actions:
        stage = stages.index(action.stage)
        in_flight[stage] += action.op == "F"
        between[stage] -= action.op == "W"
        points.append(SchedulePoint(action.op, stage, tuple(in_flight), tuple(between), tuple(completed)))
        between[stage] += action.op == "I"
        if action.op == "W" or (action.op == "B" and (action.stage, action.micro_batch) not in split):
            in_flight[stage] -= 1
            completed[stage] += 1
    return points


@cache
def rank_actions(kind: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    """The actions of every rank."""
    return [list(flatten_actions(order)) for order in action_orders(kind, ranks, micro_batches, stages_per_rank)]
