"""The passes of a pipeline rank in order, and what each finds: gathered parameters, earlier gradients; torch-free.

Whether a pass has to all-gather the parameters of its stage follows from the schedule and from what is resharded when:

| parameters | F | B, I, W | after the last B or W of a stage |
|---|---|---|---|
| local: they are not sharded | | | |
| once: gathered once, and never resharded | gathers once per step | | |
| stays: all stay unsharded | gathers once per step | | resharded |
| micro_step: they stay until the end of the micro-step | gathers | resharded | |
| reshards: after every use | gathers, resharded | gathers; resharded without a pipeline | resharded |

With a pipeline, backward passes leave the parameters of their stage unsharded for the next pass. With several stages
per rank, torch's runtime (`_add_unshard_reshard`) unshards all units of a stage before its first action, and reshards a
stage that is not among the next three in use.

Without a pipeline, a step is a pipeline of one rank. Long schedules repeat the same round, so three rounds stand for
all; `passes_per_step` counts the rest.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from operator import add
from typing import Literal, NamedTuple

from meshwright.base.topology.schedule_orders import Action, flatten_actions, rank_order
from meshwright.base.topology.schedules import SCHEDULES

Resharding = Literal["local", "once", "stays", "micro_step", "reshards"]
LOOKAHEAD_STAGES = 3


class ScheduleSize(NamedTuple):
    """A pipeline schedule of a size; a hashable cache key."""

    kind: str
    ranks: int
    micro_batches: int
    stages_per_rank: int


class PassKind(NamedTuple):
    """A pass of one micro-batch through one stage, without the number of the micro-batch."""

    stage: int
    """the index of the stage among the rank's stages"""
    op: str
    """F, B, I or W; R: the stage is resharded"""
    gathers: str = ""
    """sharded: parameters are all-gathered from all shards; resharded: from fewer ranks; empty: they are there"""
    whole: bool = False
    """all units are unsharded before the pass, and not unit by unit"""
    keeps: bool = True
    """parameters stay unsharded after the pass"""
    accumulates: bool = False
    """earlier micro-batches left gradients"""
    last: bool = False
    """the gradients of the stage are complete"""


@cache
def rank_actions(schedule: ScheduleSize, rank: int) -> list[Action]:
    """The actions of a rank. Published runs may have fewer micro-batches than stages, which torch refuses."""
    if schedule.ranks == 1:
        return [Action(0, op, micro) for micro in range(schedule.micro_batches) for op in "FB"]
    return list(flatten_actions(rank_order(schedule.kind, rank, *schedule[1:])))


@cache
def schedule_passes(
    schedule: ScheduleSize, rank: int, resharding: Resharding, partly: bool = False
) -> tuple[PassKind, ...]:
    """The passes of a rank in order; `partly` if units stay sharded over fewer ranks between forward and backward."""
    actions = rank_actions(schedule, rank)
    stages = sorted({action.stage for action in actions})
    several = schedule.ranks > 1 and not SCHEDULES[schedule.kind].single_stage
    last = {action.stage: index for index, action in enumerate(actions) if action.op in ("B", "W")}
    state = dict.fromkeys(stages, "sharded" if resharding != "local" else "")
    after_forward = "resharded" if partly else "sharded"
    upcoming = next_stages(actions) if several else []
    active: set[int] = set()
    has_gradients: set[int] = set()
    passes = []
    for index, action in enumerate(actions):
        stage, whole = action.stage, False
        if several and resharding not in ("local", "once"):
            for released in () if active <= upcoming[index] else sorted(active - upcoming[index]):
                active.remove(released)
                if state[released] != "sharded":
                    passes.append(PassKind(stages.index(released), "R", state[released]))
                    state[released] = "sharded"
            whole = stage not in active
            active.add(stage)
        gathers = state[stage] if state[stage] in ("sharded", "resharded") else ""
        is_last = last[stage] == index
        keeps = True
        if resharding != "local":
            if action.op == "F":
                keeps = resharding != "reshards"
                state[stage] = "unsharded" if keeps else after_forward
            else:
                keeps = schedule.ranks > 1 or resharding == "once" or (resharding == "stays" and not is_last)
                state[stage] = "unsharded" if keeps and not is_last else "sharded"
        accumulates = stage in has_gradients
        passes.append(
            PassKind(stages.index(stage), action.op, gathers, whole and bool(gathers), keeps, accumulates, is_last)
        )  # fmt: skip
        if action.op in ("B", "W"):
            has_gradients.add(stage)
    return tuple(passes)


def next_stages(actions: list[Action]) -> list[frozenset[int]]:
    """For every action, the stages of it and of those that follow, up to torch's lookahead."""
    order: list[int] = []  # by their next use
    following: frozenset[int] = frozenset()
    upcoming = []
    for action in reversed(actions):
        stage = action.stage
        if stage in order:
            order.remove(stage)
        order.insert(0, stage)
        if stage not in following:
            following = frozenset(order[:LOOKAHEAD_STAGES])
        upcoming.append(following)
    return upcoming[::-1]


def shortened(schedule: ScheduleSize) -> ScheduleSize:
    """The schedule with the fewest micro-batches that contains every pattern: later rounds repeat the third."""
    rounds = max(1, schedule.micro_batches // schedule.ranks)
    if rounds < 4 or (schedule.ranks > 1 and SCHEDULES[schedule.kind].all_forward_first):
        return schedule
    if schedule.micro_batches % rounds and schedule.stages_per_rank > 1 and SCHEDULES[schedule.kind].even_rounds:
        return schedule  # torch refuses it; published runs have a last round that is shorter than the others
    return schedule._replace(micro_batches=3 * (schedule.micro_batches // rounds))


@cache
def passes_per_step(
    schedule: ScheduleSize, rank: int, resharding: Resharding, partly: bool = False
) -> tuple[tuple[PassKind, int], ...]:
    """How often each pass runs in a step. Every further round adds what the third one added."""
    counts = Counter(schedule_passes(shortened(schedule), rank, resharding, partly))
    counts.update(further_passes(schedule, rank, resharding, partly))
    return tuple((kind, count) for kind, count in counts.items() if count)


@cache
def further_passes(schedule: ScheduleSize, rank: int, resharding: Resharding, partly: bool) -> dict[PassKind, int]:
    """The passes of the rounds that a shortened schedule leaves out."""
    short = shortened(schedule)
    missing = schedule.micro_batches - short.micro_batches
    if not missing:
        return {}
    round_size = short.micro_batches // 3
    three = Counter(schedule_passes(short, rank, resharding, partly))
    two = Counter(schedule_passes(short._replace(micro_batches=2 * round_size), rank, resharding, partly))
    return {kind: (count - two[kind]) * missing // round_size for kind, count in three.items() if count != two[kind]}


class PeakPoints(NamedTuple):
    """The passes at which memory may peak."""

    kinds: tuple[PassKind, ...]
    """all passes of the rank"""
    points: tuple[tuple[int, tuple[int, ...]], ...]
    """the index of a pass in `kinds`, and how often each of them has run before it"""


@cache
def peak_points(schedule: ScheduleSize, rank: int, resharding: Resharding, partly: bool = False) -> PeakPoints:
    """Of equal passes, those with the most micro-batches in flight, with the most that wait for weight gradients, and
    the latest one of these count: later ones find more that was kept.
    """
    short, further = shortened(schedule), further_passes(schedule, rank, resharding, partly)
    round_passes = short.micro_batches // 3 * schedule.stages_per_rank
    passes = schedule_passes(short, rank, resharding, partly)
    kinds = tuple(dict.fromkeys(passes))
    index = {kind: number for number, kind in enumerate(kinds)}
    numbers = [index[kind] for kind in passes]
    in_flight = waiting = completed = 0
    fullest: list[list[tuple[tuple[int, ...], int, bool]]] = [[((), 0, False)] * 3 for _ in kinds]
    for position, number in enumerate(numbers):
        op = kinds[number].op
        in_flight += op == "F"
        waiting -= op == "W"
        is_later = bool(further) and completed >= round_passes
        orders = (
            (in_flight, waiting, completed),
            (2 * in_flight + waiting, completed),
            (in_flight + 2 * completed + waiting, in_flight),
        )
        known = fullest[number]
        for each, order in enumerate(orders):
            if known[each][0] <= order:
                known[each] = order, position, is_later
        waiting += op == "I"
        if op in ("B", "W"):
            in_flight -= 1
            completed += 1
    chosen = {(position, is_later) for known in fullest for _, position, is_later in known}
    more = [further.get(kind, 0) for kind in kinds]
    counts, points = [0] * len(kinds), []
    for position, number in enumerate(numbers):
        for is_later in (False, True):
            if (position, is_later) in chosen:
                points.append((number, tuple(map(add, counts, more)) if is_later else tuple(counts)))
        counts[number] += 1
    return PeakPoints(kinds, tuple(points))
