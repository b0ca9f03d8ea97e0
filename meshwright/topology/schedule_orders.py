"""The order of actions on every rank of a pipeline, action by action as torch's schedules run them. Torch-free.

An action is a forward pass (F), a full backward pass (B), or one half of a split backward pass: the gradient of the
input (I), which the previous stage waits for, or that of the weights (W), which nothing waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.topology.schedules import find_schedule, stages_on_rank, validate_schedule


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage; `op` is F, B, I or W."""

    stage: int
    op: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class OverlappedPair:
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
    if name == "zbv":
        return [zbv_order(rank, ranks, micro_batches) for rank in range(ranks)]
    if name == "dualpipev":
        return [dualpipev_order(rank, ranks, micro_batches) for rank in range(ranks)]
    return [loop_order(name, rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks)]


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

    def action(op: str, turn: int) -> Action:
        """The turn-th action of this kind on the rank."""
        cycle, within_cycle = divmod(turn, round_size * stages_per_rank)
        local_stage, position = divmod(within_cycle, round_size)
        local_stage = local_stage if op == "F" else stages_per_rank - 1 - local_stage
        return Action(rank + ranks * local_stage, op, cycle * round_size + position)

    order: ActionOrder = [action("F", turn) for turn in range(min(warmup, total))]
    for turn in range(total):
        if warmup + turn < total:
            order.append(action("F", warmup + turn))
        order.append(action("I" if schedule.splits_backward else "B", turn))
        if schedule.splits_backward and turn >= rank:
            order.append(action("W", turn - rank))
    if schedule.splits_backward:
        order += [action("W", turn) for turn in range(max(0, total - rank), total)]
    return order


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
        for _ in range(repeat):
            for item in notation.split():
                forward, _, backward = item.partition("+")
                self.order.append(
                    OverlappedPair(self.action(forward), self.action(backward)) if backward else self.action(item)
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
