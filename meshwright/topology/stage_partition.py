"""Partitions blocks into pipeline stages so that the most expensive stage is as cheap as possible. Torch-free."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from meshwright.errors import ConfigError


@lru_cache(maxsize=64)
def partition_blocks(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """The consecutive blocks of every stage, from the cost of every block; every stage has at least one. Of equally
    good partitions, the one with the most blocks in the first stages is taken.
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
        choices = [
            min((max(sums[end] - sums[i], max_cost[end]), -end) for end in range(i + 1, blocks - remaining + 2))
            if i <= blocks - remaining
            else (float("inf"), 0)
            for i in range(blocks + 1)
        ]
        max_cost = [cost for cost, _ in choices]
        next_starts.insert(0, [-end for _, end in choices])
    starts = [0]
    for next_start in next_starts:
        starts.append(next_start[starts[-1]])
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], blocks], strict=True))
