"""The timeline of a pipeline schedule: when every action runs, the bubble, and the micro-batches in flight. Torch-free.

An action starts when its rank is free and its inputs exist: F after F of the previous stage; B or I after the backward
pass of the next stage and its own F; W after its own I. Communication takes no time. An overlapped pair is one unit: it
starts when the inputs of both exist, takes the time of both, and both results are available at its end, as torch sends
them. Time is measured in slots; B takes as long as I and W together.

A micro-batch is in flight on a stage from the start of its F to the end of its B, or of its W if backward is split: W
still needs the inputs of the layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from meshwright.base.topology.schedule_orders import Action, ActionOrder, action_orders, flatten_actions
from meshwright.base.topology.schedules import SCHEDULES, find_schedule, validate_schedule
from meshwright.errors import ConfigError

Number = int | float | Fraction
ActionKey = tuple[int, str, int]
"""(op, stage, micro-batch)"""
ActionCost = Callable[[Action], Number]
"""The duration of an action; stages may differ."""

MAX_RANKS, MAX_MICRO_BATCHES, MAX_PASSES = 256, 4096, 2**16
"""The largest timeline that is built: ranks, micro-batches, and micro-batches times stages."""


@dataclass(frozen=True)
class ActionCosts:
    """The slots that each kind of action takes on one stage."""

    forward: Number = 1
    backward_input: Number = 1
    weight: Number = 1

    def __post_init__(self) -> None:
        for name, slots in vars(self).items():
            if not 0 < slots < float("inf"):
                raise ConfigError(f"{name} takes {slots} slots", "expected a finite number above 0")

    def slots(self, op: str) -> Number:
        return {
            "F": self.forward,
            "B": self.backward_input + self.weight,
            "I": self.backward_input,
            "W": self.weight,
        }[op]


class TimelineSlot(NamedTuple):
    """An action at its time on a rank; `paired` if it is one half of an overlapped pair."""

    action: Action
    start: Number
    end: Number
    paired: bool = False


@dataclass(frozen=True)
class Timeline:
    """The slots of every rank in order, and what follows from them."""

    schedule: str
    ranks: int
    micro_batches: int
    stages_per_rank: int
    rows: list[list[TimelineSlot]]
    stage_peaks: list[dict[int, int]]
    """for every rank, the largest number of micro-batches in flight on each of its stages"""
    rank_peaks: list[int]
    """for every rank, the largest number of micro-batches in flight at once, summed over its stages"""

    @property
    def makespan(self) -> Number:
        return max(row[-1].end for row in self.rows)

    @property
    def idle(self) -> list[Number]:
        """The idle slots of each rank, from the start of the first rank to the end of the last one."""
        makespan = self.makespan
        return [makespan - sum(slot.end - slot.start for slot in row) for row in self.rows]

    @property
    def bubble(self) -> Fraction:
        """The idle fraction of all ranks' time."""
        return Fraction(sum(self.idle)) / (self.ranks * Fraction(self.makespan))

    @property
    def normalized_peaks(self) -> list[Fraction]:
        """`rank_peaks` in units of all layers of a rank, so that schedules with different V compare."""
        return [Fraction(peak, self.stages_per_rank) for peak in self.rank_peaks]


def build_timeline(
    name: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None = None,
    costs: ActionCosts | None = None,
) -> Timeline:
    """The timeline of a schedule; `stages_per_rank` defaults to that of the schedule."""
    stages_per_rank = find_schedule(name).default_stages if stages_per_rank is None else stages_per_rank
    validate_schedule(name, ranks, micro_batches, stages_per_rank)
    validate_size(ranks, micro_batches, stages_per_rank)
    orders = action_orders(name, ranks, micro_batches, stages_per_rank)
    durations = costs or ActionCosts()
    return Timeline(
        name,
        ranks,
        micro_batches,
        stages_per_rank,
        rows=execute_orders(orders, ranks * stages_per_rank, lambda action: durations.slots(action.op)),
        stage_peaks=[peak_in_flight_by_stage(order) for order in orders],
        rank_peaks=[peak_in_flight(order) for order in orders],
    )


def compare_schedules(
    ranks: int, micro_batches: int, stages_per_rank: int | None = None, costs: ActionCosts | None = None
) -> dict[str, Timeline | ConfigError]:
    """The timeline of every schedule, or the error that says why it has none."""
    validate_schedule("gpipe", ranks, micro_batches, 1)
    validate_size(ranks, micro_batches, 1)
    timelines: dict[str, Timeline | ConfigError] = {}
    for name in SCHEDULES:
        try:
            timelines[name] = build_timeline(name, ranks, micro_batches, stages_per_rank, costs)
        except ConfigError as error:
            timelines[name] = error
    return timelines


def bubble_formula(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, costs: ActionCosts | None = None
) -> tuple[str, Fraction] | None:
    """The bubble in closed form (P ranks, M micro-batches, V stages per rank) and its value. None where it is inexact:
    the pipeline must fill, and schedules that split backward need F, I and W of equal length.
    """
    costs = costs or ActionCosts()
    schedule = find_schedule(name)
    if schedule.splits_backward and not costs.forward == costs.backward_input == costs.weight:
        return None
    if micro_batches < schedule.fill_micro_batches(ranks):
        return None
    return schedule.bubble_formula, schedule.bubble(ranks, micro_batches, stages_per_rank)


def validate_size(ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    """Raises a ConfigError for a timeline that is too large to build or to look at."""
    for count, limit, name in ((ranks, MAX_RANKS, "ranks"), (micro_batches, MAX_MICRO_BATCHES, "micro-batches")):
        if count > limit:
            raise ConfigError(f"a timeline of {count} {name} is too large", f"expected at most {limit}")
    if ranks * stages_per_rank * micro_batches > MAX_PASSES:
        raise ConfigError(
            f"a timeline of {micro_batches} micro-batches through {ranks * stages_per_rank} stages is too large",
            f"expected at most {MAX_PASSES} micro-batches times stages",
        )


def dependencies(action: Action, stages: int, split: set[tuple[int, int]]) -> tuple[ActionKey, ...]:
    """The actions that must end before this one starts; `split` has the (stage, micro-batch) with a split backward."""
    stage, op, micro_batch = action
    if op == "F":
        return ((stage - 1, "F", micro_batch),) if stage else ()
    if op == "W":
        return ((stage, "I", micro_batch),)
    if stage + 1 == stages:
        return ((stage, "F", micro_batch),)
    following = "I" if (stage + 1, micro_batch) in split else "B"
    return (stage, "F", micro_batch), (stage + 1, following, micro_batch)


def execute_orders(orders: Sequence[ActionOrder], stages: int, cost: ActionCost) -> list[list[TimelineSlot]]:
    """Runs every rank as far as it gets; a blocked rank is woken by the action that it waits for. Orders that deadlock
    raise a ValueError.
    """
    split = split_backwards(action for order in orders for action in flatten_actions(order))
    rows: list[list[TimelineSlot]] = [[] for _ in orders]
    position = [0] * len(orders)
    end_times: dict[ActionKey, Number] = {}
    blocked: defaultdict[ActionKey, list[int]] = defaultdict(list)
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        row, order = rows[rank], orders[rank]
        while position[rank] < len(order):
            step = order[position[rank]]
            actions: tuple[Action, ...] = (step,) if isinstance(step, Action) else step
            start = row[-1].end if row else 0
            missing = None
            for action in actions:
                for key in dependencies(action, stages, split):
                    if key not in end_times:
                        missing = missing or key
                    elif end_times[key] > start:
                        start = end_times[key]
            if missing is not None:
                blocked[missing].append(rank)
                break
            row += place_actions(actions, start, cost)
            position[rank] += 1
            for action in actions:
                end_times[action] = row[-1].end  # both results of a pair are available when both are done
                ready += blocked.pop(action, [])
    stuck = [rank for rank, order in enumerate(orders) if position[rank] < len(order)]
    if stuck:
        next_action = orders[stuck[0]][position[stuck[0]]]
        raise ValueError(f"deadlock: ranks {stuck} wait for each other; rank {stuck[0]} is to run {next_action}")
    return rows


def place_actions(actions: tuple[Action, ...], start: Number, cost: ActionCost) -> list[TimelineSlot]:
    """Consecutive slots from `start`."""
    slots: list[TimelineSlot] = []
    for action in actions:
        slots.append(TimelineSlot(action, start, start + cost(action), len(actions) > 1))
        start = slots[-1].end
    return slots


def split_backwards(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """The (stage, micro-batch) whose backward pass is split."""
    return {(action.stage, action.micro_batch) for action in actions if action.op == "I"}


def peak_in_flight_by_stage(order: ActionOrder) -> dict[int, int]:
    """The largest number of micro-batches in flight on each stage of a rank. It follows from the order alone, since a
    rank runs one action at a time.
    """
    stages = sorted({action.stage for action in flatten_actions(order)})
    return {stage: peak_in_flight([a for a in flatten_actions(order) if a.stage == stage]) for stage in stages}


def peak_in_flight(order: ActionOrder) -> int:
    """The largest number of micro-batches in flight on a rank, summed over its stages."""
    split = split_backwards(flatten_actions(order))
    in_flight, peak = 0, 0
    for action in flatten_actions(order):
        in_flight += action.op == "F"
        peak = max(peak, in_flight)
        in_flight -= action.op == "W" or (action.op == "B" and (action.stage, action.micro_batch) not in split)
    return peak
