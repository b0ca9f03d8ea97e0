"""The order of actions on every rank of a pipeline, action by action as torch's schedules run them. Torch-free.

An action is a forward pass (F), a full backward pass (B), or one half of a split backward pass: the gradient of the
input (I), which the previous stage waits for, or that of the weights (W), which nothing waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from meshwright.base.topology.schedules import find_schedule, stages_on_rank, validate_schedule


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; `op` is F, B, I or W."""

    stage: int
    op: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


class OverlappedPair(NamedTuple):
    """A forward and a backward pass that a rank may run as one, the communication of one beside the compute of the
    other. Torch runs them one after the other unless it is given a function that overlaps them.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


ActionOrder = list[Action | OverlappedPair]


def flatten_actions(order: ActionOrder) -> Iterator[Action]:
    """The actions of an order; a pair yields its forward pass, then its backward pass."""
    for step in order:
        if isinstance(step, OverlappedPair):
            yield step.forward
            yield step.backward
        else:
            yield step


def action_orders(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> list[ActionOrder]:
    """The order of every rank; `stages_per_rank` defaults to that of the schedule."""
    stages_per_rank = find_schedule(name).default_stages if stages_per_rank is None else stages_per_rank
    validate_schedule(name, ranks, micro_batches, stages_per_rank)
    return [rank_order(name, rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks)]


def rank_order(name: str, rank: int, ranks: int, micro_batches: int, stages_per_rank: int) -> ActionOrder:
    """The order of one rank."""
    if name == "zbv":
        return zbv_order(rank, ranks, micro_batches)
    if name == "dualpipev":
        return dualpipev_order(rank, ranks, micro_batches)
    return loop_order(name, rank, ranks, micro_batches, stages_per_rank)


def loop_order(name: str, rank: int, ranks: int, micro_batches: int, stages_per_rank: int) -> ActionOrder:
    """The order of schedules whose stages form a loop. They differ in the number of warm-up forward passes and in
    whether backward is split.

    A rank runs one round of micro-batches through its first stage, the same round through its next stage, and so on;
    backward runs in the same rounds from its last stage to its first.
    """
    schedule = find_schedule(name)
    total = micro_batches * stages_per_rank
    round_size = micro_batches // max(1, micro_batches // ranks)
    later_ranks = ranks - 1 - rank
    before_first_backward = (stages_per_rank - 1) * round_size  # on the last rank
    if schedule.all_forward_first:
        warmup = total
    elif schedule.single_stage or schedule.splits_backward:
        warmup = before_first_backward + later_ranks
    else:
        warmup = before_first_backward + 2 * later_ranks

    def actions(op: str) -> list[Action]:
        """The actions of this kind in order."""
        stages = [rank + ranks * local_stage for local_stage in range(stages_per_rank)]
        return [
            Action(stage, op, micro_batch)
            for first in range(0, micro_batches, round_size)
            for stage in (stages if op == "F" else reversed(stages))
            for micro_batch in range(first, min(first + round_size, micro_batches))
        ]

    forward = actions("F")
    order: ActionOrder = [*forward[:warmup]]
    rest = iter(forward[warmup:])
    if not schedule.splits_backward:
        for backward in actions("B"):
            order += (*islice(rest, 1), backward)
        return order
    weights = actions("W")
    for turn, backward in enumerate(actions("I")):
        order += (*islice(rest, 1), backward)
        if turn >= rank:
            order.append(weights[turn - rank])
    return [*order, *weights[max(0, total - rank) :]]


class OrderBuilder:
    """Builds the order of a rank with two stages from a notation: `F0` is the next forward pass of its first stage,
    `B1` the next backward pass of its second, `W0` the next weight gradient of the first, `W` the weight gradient whose
    input gradient is oldest, and `F0+B1` an overlapped pair.
    """

    def __init__(self, stages: list[int]) -> None:
        self.stages = stages
        self.order: ActionOrder = []
        self.next_micro_batch: Counter[tuple[str, int]] = Counter()
        self.pending_weight_actions: deque[Action] = deque()

    def append(self, repeat: int, notation: str) -> None:
        items = [item.partition("+") for item in notation.split()]
        for _ in range(repeat):
            for forward, _, backward in items:
                self.order.append(
                    OverlappedPair(self.action(forward), self.action(backward)) if backward else self.action(forward)
                )

    def action(self, item: str) -> Action:
        if item == "W":
            return self.pending_weight_actions.popleft()
        op, local_stage = item[0], int(item[1])
        counter = ("I" if op == "B" else op), local_stage  # a full backward pass includes the input gradient
        action = Action(self.stages[local_stage], op, self.next_micro_batch[counter])
        self.next_micro_batch[counter] += 1
        if op == "I":
            self.pending_weight_actions.append(Action(action.stage, "W", action.micro_batch))
        return action


def zbv_order(rank: int, ranks: int, micro_batches: int) -> ActionOrder:
    """ZB-V. The order is built for as many micro-batches as fill the V; those beyond `micro_batches` are dropped."""
    later_ranks = ranks - 1 - rank
    filled = max(2 * ranks - 1, micro_batches)
    builder = OrderBuilder(stages_on_rank("zbv", ranks, rank, 2))
    builder.append(2 * later_ranks + 1, "F0")
    builder.append(rank, "F1 F0")
    builder.append(later_ranks + 1, "F1 I1 W1")
    builder.append(filled - ranks - later_ranks, "F0 I0 W0 F1 I1 W1")
    builder.append(later_ranks, "I0 W0 F1 I1 W1")
    builder.append(rank, "I0 I1")
    builder.append(later_ranks + 1, "I0 W0")
    builder.append(rank, "W1")
    builder.append(rank, "W0")
    return [step for step in builder.order if isinstance(step, Action) and step.micro_batch < micro_batches]


def dualpipev_order(rank: int, ranks: int, micro_batches: int) -> ActionOrder:
    """DualPipeV: micro-batches on their way down the V overlap with others on their way back."""
    later_ranks = ranks - 1 - rank
    overlapped = micro_batches - ranks - later_ranks
    builder = OrderBuilder(stages_on_rank("dualpipev", ranks, rank, 2))
    builder.append(2 * later_ranks, "F0")
    builder.append(rank + 1, "F0 F1")
    builder.append(later_ranks, "I1 W F1")
    if later_ranks == 0:  # the first backward pass of the last rank follows its own forward pass: nothing to overlap
        builder.append(1, "F0 B1 F1+B0")
        overlapped -= 1
    builder.append(overlapped, "F0+B1 F1+B0")
    builder.append(later_ranks, "B1 F1+B0")
    # The second half of the last backward passes is split, and weight gradients fill the slots of the cool-down.
    for turn in range(2 * (rank + 1)):
        builder.append(1, f"{'B' if turn <= rank else 'I'}{1 - turn % 2}")
    builder.append(later_ranks, "W I0")
    builder.append(rank + 1, "W")
    return builder.order
