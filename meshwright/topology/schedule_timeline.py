"""When each action of a pipeline schedule runs: the timeline, its bubble, and what is held meanwhile. Torch-free.

An action begins when its rank is free and what it needs is there: F of a stage after F of the stage before, B or I
after that of the stage behind and after its own F, W after its own I. Messages take no time. A pair is one thing: it
begins when what both need is there, takes as long as both, and both results leave at its end, as torch sends them.
Time is counted in slots; B takes as long as I and W together.

A stage holds what a micro-batch's backward pass needs from the begin of its F to the end of its B, or of its W where B
is in two parts: W needs the layers' inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from meshwright.errors import ConfigError
from meshwright.topology.schedules import (
    KINDS,
    Action,
    ActionOrder,
    action_orders,
    default_stages,
    flatten_actions,
    validate_schedule,
)

Number = int | float | Fraction
Key = tuple[str, int, int]
Cost = Callable[[Action], Number]
"""How long an action takes; stages may differ."""

MAX_RANKS, MAX_MICRO_BATCHES, MAX_PASSES = 256, 4096, 2**16
"""Where a timeline ends: ranks, micro-batches, and micro-batches times stages."""


@dataclass(frozen=True)
class ActionCosts:
    """Slots that the parts take on one stage."""

    forward: Number = 1
    backward_input: Number = 1
    weight: Number = 1

    def __post_init__(self) -> None:
        for name, slots in vars(self).items():
            if not 0 < slots < float("inf"):
                raise ConfigError(f"{name} takes {slots} slots", "allowed: more than 0")

    def slots(self, what: str) -> Number:
        return {
            "F": self.forward,
            "B": self.backward_input + self.weight,
            "I": self.backward_input,
            "W": self.weight,
        }[what]


@dataclass(frozen=True, slots=True)
class TimelineSlot:
    """An action in its place on the rank's timeline; `paired` where it is one half of a pair."""

    action: Action
    start: Number
    end: Number
    paired: bool = False


@dataclass(frozen=True)
class Timeline:
    """Every rank's slots in order, and what follows from them."""

    schedule: str
    ranks: int
    micro_batches: int
    stages_per_rank: int
    rows: list[list[TimelineSlot]]
    stage_peaks: list[dict[int, int]]
    """Of every rank, stage by stage: the most micro-batches held at once."""
    rank_peaks: list[int]
    """Of every rank: the most that its stages hold together at once, one for each micro-batch of each stage."""

    @property
    def makespan(self) -> Number:
        return max(row[-1].end for row in self.rows)

    @property
    def idle(self) -> list[Number]:
        """Slots of each rank in which it waits, from the first rank's begin to the last one's end."""
        makespan = self.makespan
        return [makespan - sum(slot.end - slot.start for slot in row) for row in self.rows]

    @property
    def bubble(self) -> Fraction:
        """The share of all ranks' time in which they wait."""
        return Fraction(sum(self.idle)) / (self.ranks * Fraction(self.makespan))

    @property
    def normalized_peaks(self) -> list[Fraction]:
        """`peaks` in units of all the layers of a rank, by which kinds of different numbers of stages compare."""
        return [Fraction(peak, self.stages_per_rank) for peak in self.rank_peaks]


def build_timeline(
    kind: str, ranks: int, micros: int, each: int | None = None, costs: ActionCosts | None = None
) -> Timeline:
    """Of a schedule; stages a rank as usual for the kind where `each` is not given."""
    each = default_stages(kind) if each is None else each
    validate_schedule(kind, ranks, micros, each)
    validate_size(ranks, micros, each)
    order = action_orders(kind, ranks, micros, each)
    live = [peak_in_flight_by_stage(row) for row in order]
    slots = costs or ActionCosts()
    rows = execute_orders(order, ranks * each, lambda action: slots.slots(action.op))
    return Timeline(kind, ranks, micros, each, rows, live, [peak_in_flight(row) for row in order])


def compare_schedules(
    ranks: int, micros: int, each: int | None = None, costs: ActionCosts | None = None
) -> dict[str, Timeline | ConfigError]:
    """Every kind's timeline, or why it has none."""
    validate_schedule("gpipe", ranks, micros, 1)
    validate_size(ranks, micros, 1)
    found: dict[str, Timeline | ConfigError] = {}
    for kind in KINDS:
        try:
            found[kind] = build_timeline(kind, ranks, micros, each, costs)
        except ConfigError as refused:
            found[kind] = refused
    return found


def bubble_formula(
    kind: str, ranks: int, micros: int, each: int, costs: ActionCosts | None = None
) -> tuple[str, Fraction] | None:
    """The bubble in closed form (P ranks, M micro-batches, V stages a rank) and its value, where it is exact: the split
    kinds' needs F, I and W of one length, and all but the first two enough micro-batches to fill the pipeline.
    """
    costs = costs or ActionCosts()
    even = costs.forward == costs.backward_input == costs.weight
    waits = ranks - 1
    if kind in ("gpipe", "1f1b"):
        return "(P-1)/(M+P-1)", Fraction(waits, micros + waits)
    if kind == "interleaved" and micros >= ranks:
        return "(P-1)/(V*M+P-1)", Fraction(waits, each * micros + waits)
    fill = {"zero-bubble": ranks, "zbv": 2 * ranks - 1}.get(kind)
    if even and fill is not None and micros >= fill:
        return "(P-1)/(3*V*M+P-1)", Fraction(waits, 3 * each * micros + waits)
    if even and kind == "dualpipev":
        return "(P-1)/(3*M+P-1)", Fraction(waits, 3 * micros + waits)
    return None


def validate_size(ranks: int, micros: int, each: int) -> None:
    """A timeline has an end: what is larger than anybody can look at is refused before it is made."""
    for count, most, name in ((ranks, MAX_RANKS, "ranks"), (micros, MAX_MICRO_BATCHES, "micro-batches")):
        if count > most:
            raise ConfigError(f"a timeline of {count} {name} is too large", f"allowed: up to {most}")
    if ranks * each * micros > MAX_PASSES:
        raise ConfigError(
            f"a timeline of {micros} micro-batches through {ranks * each} stages is too large",
            f"allowed: up to {MAX_PASSES} micro-batches times stages",
        )


def dependencies(action: Action, stages: int, split: set[tuple[int, int]]) -> list[Key]:
    """What must have ended before an action can begin."""
    stage, micro = action.stage, action.micro_batch
    if action.op == "F":
        return [("F", stage - 1, micro)] if stage else []
    if action.op == "W":
        return [("I", stage, micro)]
    behind = "I" if (stage + 1, micro) in split else "B"
    own = ("F", stage, micro)
    return [own, (behind, stage + 1, micro)] if stage + 1 < stages else [own]


def execute_orders(order: Sequence[ActionOrder], stages: int, cost: Cost) -> list[list[TimelineSlot]]:
    """Runs every rank as far as it gets; a rank that has to wait is woken by the action that it waits for."""
    split = {(action.stage, action.micro_batch) for row in order for action in flatten_actions(row) if action.op == "I"}
    rows: list[list[TimelineSlot]] = [[] for _ in order]
    reached = [0] * len(order)
    ended: dict[Key, Number] = {}
    sleeping: defaultdict[Key, list[int]] = defaultdict(list)
    awake = list(range(len(order)))
    while awake:
        rank = awake.pop()
        row = rows[rank]
        while reached[rank] < len(order[rank]):
            actions = list(flatten_actions([order[rank][reached[rank]]]))
            needed = [key for action in actions for key in dependencies(action, stages, split)]
            missing = next((key for key in needed if key not in ended), None)
            if missing is not None:
                sleeping[missing].append(rank)
                break
            start = max([ended[key] for key in needed], default=0)
            row += place_actions(actions, max(start, row[-1].end if row else 0), cost)
            reached[rank] += 1
            for action in actions:
                key = (action.op, action.stage, action.micro_batch)
                ended[key] = row[-1].end  # of a pair both: the results of either leave when both are done
                awake += sleeping.pop(key, [])
    stuck = [rank for rank, row in enumerate(order) if reached[rank] < len(row)]
    if stuck:
        first = order[stuck[0]][reached[stuck[0]]]
        raise ValueError(f"ranks {stuck} wait for each other for ever, rank {stuck[0]} to run {first}")
    return rows


def place_actions(actions: list[Action], start: Number, cost: Cost) -> list[TimelineSlot]:
    """One after the other from a slot on."""
    slots: list[TimelineSlot] = []
    for action in actions:
        slots.append(TimelineSlot(action, start, start + cost(action), len(actions) > 1))
        start = slots[-1].end
    return slots


def peak_in_flight_by_stage(order: ActionOrder) -> dict[int, int]:
    """The most micro-batches that each stage of a rank holds at once. It follows from the order alone: a rank does one
    thing at a time.
    """
    stages = sorted({action.stage for action in flatten_actions(order)})
    return {stage: peak_in_flight([a for a in flatten_actions(order) if a.stage == stage]) for stage in stages}


def peak_in_flight(order: ActionOrder) -> int:
    split = {(action.stage, action.micro_batch) for action in flatten_actions(order) if action.op == "I"}
    held, most = 0, 0
    for action in flatten_actions(order):
        held += action.op == "F"
        most = max(most, held)
        held -= action.op == "W" or (action.op == "B" and (action.stage, action.micro_batch) not in split)
    return most
