"""Pipeline schedules: the order in which each rank runs its stages' micro-batches, for torch's six kinds. Torch-free.

An action is a forward pass (F), a whole backward pass (B), or a backward pass in two parts: the gradient of the input
(I), which the stage before waits for, and that of the weights (W), which nobody waits for and which fills gaps.

| kind | stages a rank | the order of a rank |
|---|---|---|
| gpipe | 1 | every F, then every B |
| 1f1b | 1 | as many F as there are ranks behind, then F and B in turn, then what is left of B |
| interleaved | 2 or more, in a loop | the same by rounds of micro-batches, the stages of a rank taking turns |
| zero-bubble | 1 or more, in a loop | fewer F ahead, B in two parts, and W later by the rank's number of turns |
| zbv | 2, in a V | F of the way down ahead, then all six actions of both stages in turn |
| dualpipev | 2, in a V | F of one stage and B of the other overlap |

Sources: GPipe arXiv:1811.06965, 1F1B arXiv:1806.03377, interleaving arXiv:2104.04473, zero bubble and ZB-V
arXiv:2401.10241, DualPipe arXiv:2412.19437. tests/plan/test_schedule.py holds the orders against torch's own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.errors import ConfigError

KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")
SINGLE = ("gpipe", "1f1b")
"""Those with one stage a rank."""
SPLIT = ("zero-bubble", "zbv", "dualpipev")
"""Those that compute the gradients of weights later than those of inputs."""
FEWEST_STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipev": 2}
MOST_STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""Of a rank; a kind that is not here takes any number."""


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage. `what` is F, B, I or W."""

    stage: int
    op: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class OverlappedPair:
    """A forward and a backward pass that a rank may run as one, the messages of one beside the arithmetic of the
    other. Torch runs them one after the other unless it is given a function that does better.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


ActionOrder = list[Action | OverlappedPair]


def flatten_actions(order: ActionOrder) -> Iterator[Action]:
    """With pairs taken apart, forward first."""
    for step in order:
        if isinstance(step, OverlappedPair):
            yield step.forward
            yield step.backward
        else:
            yield step


def stages_on_rank(kind: str, ranks: int, rank: int, each: int) -> list[int]:
    """The stages that a rank holds. In a loop every round of stages begins at rank 0 again; in a V the second round
    comes back, so that the last rank hands over to itself and rank 0 holds both ends of the model.
    """
    if kind in V_SHAPED:
        return [round_ * ranks + (ranks - 1 - rank if round_ % 2 else rank) for round_ in range(each)]
    return [rank + round_ * ranks for round_ in range(each)]


def rank_of_stage(kind: str, ranks: int, stage: int) -> int:
    """The rank that holds a stage."""
    round_, place = divmod(stage, ranks)
    return ranks - 1 - place if kind in V_SHAPED and round_ % 2 else place


def default_stages(kind: str) -> int:
    """Stages a rank when nobody says: two, where the kind takes more than one."""
    check_kind(kind)
    return min(2, MOST_STAGES.get(kind, 2))


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"unknown schedule {kind!r}", f"allowed: {', '.join(KINDS)}")


def validate_schedule(kind: str, ranks: int, micros: int, each: int) -> None:
    """Refuses what torch refuses, and what it would run to no use, with the numbers that would do."""
    check_kind(kind)
    if ranks < 1 or micros < 1:
        raise ConfigError(f"{ranks} ranks and {micros} micro-batches make no pipeline", "allowed: 1 or more of each")
    fewest, most = FEWEST_STAGES[kind], MOST_STAGES.get(kind)
    if each < fewest or (most is not None and each > most):
        allowed = f"{fewest}" if fewest == most else f"{fewest} or more"
        raise ConfigError(f"schedule {kind} cannot have {each} stages a rank", f"allowed: {allowed}")
    least = min_micro_batches(kind, ranks)
    if micros < least:
        raise ConfigError(
            f"schedule {kind} on {ranks} ranks cannot fill its stages with {micros} micro-batches",
            f"allowed: {least} micro-batches or more",
        )
    rounds = max(1, micros // ranks)
    if kind in ("interleaved", "zero-bubble") and micros % rounds:
        raise ConfigError(
            f"schedule {kind} cannot divide {micros} micro-batches evenly into {rounds} rounds of {ranks} or more",
            f"allowed: {', '.join(map(str, nearest_valid(micros, lambda m: m % max(1, m // ranks) == 0)))}",
        )


def min_micro_batches(kind: str, ranks: int) -> int:
    """1F1B and DualPipeV fill every stage before the first backward pass."""
    return {"1f1b": ranks, "dualpipev": 2 * ranks}.get(kind, 1)


def nearest_valid(number: int, fits: Callable[[int], bool]) -> list[int]:
    """The nearest that fit, below and above."""
    below = next((n for n in range(number - 1, 0, -1) if fits(n)), None)
    above = next(n for n in range(number + 1, 2 * number + 2) if fits(n))
    return [n for n in (below, above) if n is not None]


def action_orders(kind: str, ranks: int, micros: int, each: int | None = None) -> list[ActionOrder]:
    """The order of every rank; stages a rank as usual for the kind where `each` is not given."""
    each = default_stages(kind) if each is None else each
    validate_schedule(kind, ranks, micros, each)
    if kind == "zbv":
        return [zbv_order(rank, ranks, micros) for rank in range(ranks)]
    if kind == "dualpipev":
        return [dualpipev_order(rank, ranks, micros) for rank in range(ranks)]
    return [loop_order(kind, rank, ranks, micros, each) for rank in range(ranks)]


def loop_order(kind: str, rank: int, ranks: int, micros: int, each: int) -> ActionOrder:
    """Some F ahead, then F and B in turn: four kinds that differ in how many are ahead and in what B is.

    A rank takes a round of micro-batches through its first stage, the same through its next, and so on; backward in
    the same rounds from its last stage to its first.
    """
    total = micros * each
    a_round = micros // max(1, micros // ranks)
    behind = ranks - 1 - rank
    in_turn = (each - 1) * a_round  # F before the first B on the last rank
    ahead = {"gpipe": total, "interleaved": in_turn + 2 * behind}.get(kind, in_turn + behind)
    split = kind == "zero-bubble"

    def place(turn: int) -> tuple[int, int]:
        """(which of the rank's stages, micro-batch) of the turn-th F."""
        cycle, within = divmod(turn, a_round * each)
        local, position = divmod(within, a_round)
        return local, cycle * a_round + position

    def action(what: str, turn: int) -> Action:
        local, micro = place(turn)
        return Action(rank + ranks * (local if what == "F" else each - 1 - local), what, micro)

    order: ActionOrder = [action("F", turn) for turn in range(min(ahead, total))]
    for turn in range(total):
        if ahead + turn < total:
            order.append(action("F", ahead + turn))
        order.append(action("I" if split else "B", turn))
        if split and turn >= rank:
            order.append(action("W", turn - rank))
    if split:
        order += [action("W", turn) for turn in range(max(0, total - rank), total)]
    return order


class OrderBuilder:
    """Writes a V-shaped rank's order from words: `F0` is the next F of its first stage, `B1` the next B of its second,
    `W0` the next W of the first, `W` the W whose I is oldest, and `F0+B1` a pair.
    """

    def __init__(self, stages: list[int]) -> None:
        self.stages = stages
        self.order: ActionOrder = []
        self.next: Counter[tuple[str, int]] = Counter()
        self.pending_weight_actions: deque[Action] = deque()

    def append(self, times: int, words: str) -> None:
        for _ in range(times):
            for word in words.split():
                forward, _, backward = word.partition("+")
                self.order.append(
                    OverlappedPair(self.action(forward), self.action(backward)) if backward else self.action(word)
                )

    def action(self, word: str) -> Action:
        if word == "W":
            return self.pending_weight_actions.popleft()
        what, local = word[0], int(word[1])
        counted = ("I" if what == "B" else what), local  # a whole backward is its micro-batch's I as well
        action = Action(self.stages[local], what, self.next[counted])
        self.next[counted] += 1
        if what == "I":
            self.pending_weight_actions.append(Action(action.stage, "W", action.micro_batch))
        return action


def zbv_order(rank: int, ranks: int, micros: int) -> ActionOrder:
    """ZB-V. It is written for as many micro-batches as fill the V, and those that are not there are left out."""
    behind = ranks - 1 - rank
    filling = max(2 * ranks - 1, micros)
    writer = OrderBuilder(stages_on_rank("zbv", ranks, rank, 2))
    writer.append(2 * behind + 1, "F0")
    writer.append(rank, "F1 F0")
    writer.append(behind + 1, "F1 I1 W1")
    writer.append(filling - ranks - behind, "F0 I0 W0 F1 I1 W1")
    writer.append(behind, "I0 W0 F1 I1 W1")
    writer.append(rank, "I0 I1")
    writer.append(behind + 1, "I0 W0")
    writer.append(rank, "W1")
    writer.append(rank, "W0")
    return [step for step in writer.order if isinstance(step, Action) and step.micro_batch < micros]


def dualpipev_order(rank: int, ranks: int, micros: int) -> ActionOrder:
    """DualPipeV: micro-batches go down the V while others come back, and the two meet in pairs on every rank."""
    behind = ranks - 1 - rank
    meetings = micros - ranks - behind
    writer = OrderBuilder(stages_on_rank("dualpipev", ranks, rank, 2))
    writer.append(2 * behind, "F0")
    writer.append(rank + 1, "F0 F1")
    writer.append(behind, "I1 W F1")
    if behind == 0:  # the last rank's first B follows from its own F: nothing to overlap with yet
        writer.append(1, "F0 B1 F1+B0")
        meetings -= 1
    writer.append(meetings, "F0+B1 F1+B0")
    writer.append(behind, "B1 F1+B0")
    # Of the last backward passes the second half is split, and the W fill the gaps of the way out.
    for turn in range(2 * (rank + 1)):
        writer.append(1, f"{'B' if turn <= rank else 'I'}{1 - turn % 2}")
    writer.append(behind, "W I0")
    writer.append(rank + 1, "W")
    return writer.order
