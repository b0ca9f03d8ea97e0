"""Pipeline schedules in one table, and the stages of each rank: requirements, bubble, blocks. Torch-free.

P is the number of pipeline ranks, M the number of micro-batches per step, V the number of stages per rank. Stages are
placed in a loop (rank r has stages r, P + r, 2P + r, ...) or in a V (the second half runs back, so that rank 0 has the
first and the last stage). `schedule_orders.py` gives the order of actions on every rank.

Sources: GPipe arXiv:1811.06965, 1F1B arXiv:1806.03377, interleaved 1F1B arXiv:2104.04473, zero bubble and ZB-V
arXiv:2401.10241, DualPipe arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from meshwright.errors import ConfigError


@dataclass(frozen=True)
class PipelineSchedule:
    """What a schedule is. A new one is a row of `SCHEDULES` and its order in `schedule_orders.py`."""

    name: str
    torch_class: str
    """the class in torch.distributed.pipelining that runs it"""
    order: str
    """the order of actions on a rank, in words"""
    min_stages: int
    max_stages: int | None
    """stages per rank; None: no limit"""
    default_stages: int
    candidate_stages: tuple[int, ...]
    """the stages per rank that the planner considers"""
    min_micro_batches: Callable[[int], int]
    """of P: with fewer micro-batches torch refuses to run the schedule"""
    fill_micro_batches: Callable[[int], int]
    """of P: with fewer micro-batches the pipeline never fills, and the bubble is larger than the formula says"""
    bubble_formula: str
    bubble_divisor: Callable[[int], int]
    """of V: k in the bubble (P-1)/(k*M+P-1)"""
    v_shaped: bool = False
    splits_backward: bool = False
    """whether backward computes input gradients first and weight gradients later"""
    even_rounds: bool = False
    """whether M must be a multiple of the number of rounds, max(1, M // P)"""
    all_forward_first: bool = False
    """whether every forward pass runs before the first backward pass, so that all M micro-batches are in flight"""
    overlaps_pairs: bool = False
    """whether a forward and a backward pass of different stages form one overlapped action"""

    @property
    def single_stage(self) -> bool:
        """Whether every rank has exactly one stage."""
        return self.max_stages == 1

    def bubble(self, ranks: int, micro_batches: int, stages_per_rank: int) -> Fraction:
        """The fraction of all ranks' time that is idle, with stages of equal cost and a filled pipeline."""
        idle = ranks - 1
        return Fraction(idle, self.bubble_divisor(stages_per_rank) * micro_batches + idle)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule(
            "gpipe",
            torch_class="ScheduleGPipe",
            order="every forward pass, then every backward pass",
            min_stages=1,
            max_stages=1,
            default_stages=1,
            candidate_stages=(1,),
            min_micro_batches=lambda _ranks: 1,
            fill_micro_batches=lambda _ranks: 1,
            bubble_formula="(P-1)/(M+P-1)",
            bubble_divisor=lambda _stages: 1,
            all_forward_first=True,
        ),
        PipelineSchedule(
            "1f1b",
            torch_class="Schedule1F1B",
            order="one forward pass per later rank, then forward and backward passes in turn",
            min_stages=1,
            max_stages=1,
            default_stages=1,
            candidate_stages=(1,),
            min_micro_batches=lambda ranks: ranks,
            fill_micro_batches=lambda ranks: ranks,
            bubble_formula="(P-1)/(M+P-1)",
            bubble_divisor=lambda _stages: 1,
        ),
        PipelineSchedule(
            "interleaved",
            torch_class="ScheduleInterleaved1F1B",
            order="1F1B in rounds of micro-batches, with the stages of a rank taking turns",
            min_stages=2,
            max_stages=None,
            default_stages=2,
            candidate_stages=(2, 3, 4, 6, 8),
            min_micro_batches=lambda _ranks: 1,
            fill_micro_batches=lambda ranks: ranks,
            bubble_formula="(P-1)/(V*M+P-1)",
            bubble_divisor=lambda stages: stages,
            even_rounds=True,
        ),
        PipelineSchedule(
            "zero-bubble",
            torch_class="ScheduleInterleavedZeroBubble",
            order="interleaved with fewer forward passes ahead; weight gradients fill the idle slots",
            min_stages=1,
            max_stages=None,
            default_stages=2,
            candidate_stages=(1, 2, 4),
            min_micro_batches=lambda _ranks: 1,
            fill_micro_batches=lambda ranks: ranks,
            bubble_formula="(P-1)/(3*V*M+P-1)",
            bubble_divisor=lambda stages: 3 * stages,
            splits_backward=True,
            even_rounds=True,
        ),
        PipelineSchedule(
            "zbv",
            torch_class="ScheduleZBVZeroBubble",
            order="forward passes of the first stage ahead, then all six actions of both stages in turn",
            min_stages=2,
            max_stages=2,
            default_stages=2,
            candidate_stages=(2,),
            min_micro_batches=lambda _ranks: 1,
            fill_micro_batches=lambda ranks: 2 * ranks - 1,
            bubble_formula="(P-1)/(3*V*M+P-1)",
            bubble_divisor=lambda stages: 3 * stages,
            v_shaped=True,
            splits_backward=True,
        ),
        PipelineSchedule(
            "dualpipev",
            torch_class="ScheduleDualPipeV",
            order="the forward pass of one stage and the backward pass of the other overlap",
            min_stages=2,
            max_stages=2,
            default_stages=2,
            candidate_stages=(2,),
            min_micro_batches=lambda ranks: 2 * ranks,
            fill_micro_batches=lambda ranks: 2 * ranks,
            bubble_formula="(P-1)/(3*M+P-1)",
            bubble_divisor=lambda _stages: 3,
            v_shaped=True,
            splits_backward=True,
            overlaps_pairs=True,
        ),
    )
}

UNSPLIT_BACKWARD = tuple(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
"""Schedules that compute input and weight gradients in one backward pass."""


def find_schedule(name: str) -> PipelineSchedule:
    """The row of a schedule; an unknown name is a ConfigError."""
    if name not in SCHEDULES:
        raise ConfigError(f"unknown pipeline schedule {name!r}", f"expected one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def stages_on_rank(name: str, ranks: int, rank: int, stages_per_rank: int) -> list[int]:
    """The stages of a rank, in order."""
    if find_schedule(name).v_shaped:
        return [turn * ranks + (ranks - 1 - rank if turn % 2 else rank) for turn in range(stages_per_rank)]
    return [turn * ranks + rank for turn in range(stages_per_rank)]


def rank_of_stage(name: str, ranks: int, stage: int) -> int:
    """The pipeline rank that has a stage."""
    turn, position = divmod(stage, ranks)
    return ranks - 1 - position if find_schedule(name).v_shaped and turn % 2 else position


def validate_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    """Raises a ConfigError with the nearest valid numbers if torch would refuse to run the schedule."""
    schedule = find_schedule(name)
    if ranks < 1 or micro_batches < 1:
        raise ConfigError(
            f"a pipeline of {ranks} ranks and {micro_batches} micro-batches is empty", "expected at least 1 of each"
        )
    fewest, most = schedule.min_stages, schedule.max_stages
    if stages_per_rank < fewest or (most is not None and stages_per_rank > most):
        raise ConfigError(
            f"schedule {name} does not support {stages_per_rank} stages per rank",
            f"expected {fewest}" if fewest == most else f"expected {fewest} or more",
        )
    required = schedule.min_micro_batches(ranks)
    if micro_batches < required:
        raise ConfigError(
            f"schedule {name} on {ranks} ranks cannot fill its stages with {micro_batches} micro-batches",
            f"expected {required} micro-batches or more",
        )
    rounds = max(1, micro_batches // ranks)
    if schedule.even_rounds and micro_batches % rounds:
        valid = nearest_valid(micro_batches, lambda count: count % max(1, count // ranks) == 0)
        raise ConfigError(
            f"schedule {name} cannot divide {micro_batches} micro-batches evenly into {rounds} rounds of at least "
            f"{ranks}",
            f"expected {' or '.join(map(str, valid))} micro-batches",
        )


def nearest_valid(number: int, is_valid: Callable[[int], bool]) -> list[int]:
    """The nearest valid numbers below and above."""
    below = next((n for n in range(number - 1, 0, -1) if is_valid(n)), None)
    above = next(n for n in range(number + 1, 2 * number + 2) if is_valid(n))
    return [n for n in (below, above) if n is not None]


@lru_cache(maxsize=64)
def partition_blocks(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """The consecutive blocks of every stage, so that the most expensive stage is as cheap as possible, from the cost of
    every block; every stage has at least one. Of equally good partitions, the one with the most blocks in the first
    stages is taken.
    """
    blocks = len(costs)
    if stages > blocks:
        raise ConfigError(
            f"{stages} pipeline stages need at least as many blocks, and the model has {blocks}",
            f"expected at most {blocks} stages (layout.pipeline x pipeline.stages)",
        )
    sums = [0.0, *accumulate(costs)]
    # max_cost[i] is the cost of the most expensive stage if blocks from i on fill the remaining stages.
    max_cost = [sums[-1] - sums[i] for i in range(blocks)] + [float("inf")]
    next_starts: list[list[int]] = []
    for remaining in range(2, stages + 1):
        costs_from, ends = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        last, end = blocks - remaining + 1, 0
        for i in range(last):
            # More blocks cost this stage more and the others less: the best end is where the two meet, or one earlier.
            end = max(end, i + 1)
            while end < last and sums[end] - sums[i] < max_cost[end]:
                end += 1
            cost, best = max(sums[end] - sums[i], max_cost[end]), end
            if end > i + 1 and max_cost[end - 1] < cost:
                cost, best = max_cost[end - 1], end - 1
            while best < last and sums[best + 1] - sums[i] <= cost:
                best += 1  # blocks without a cost
            costs_from[i], ends[i] = cost, best
        max_cost = costs_from
        next_starts.insert(0, ends)
    starts = [0]
    for next_start in next_starts:
        starts.append(next_start[starts[-1]])
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], blocks], strict=True))
