"""The partition of blocks into pipeline stages: consecutive, not empty, and optimal."""

from __future__ import annotations

from itertools import combinations

import pytest

from meshwright.base.topology.schedules import partition_blocks
from meshwright.errors import ConfigError


def test_stages_are_consecutive_and_not_empty():
    for layers in (1, 2, 5, 8, 13):
        for stages in range(1, layers + 1):
            partition = partition_blocks((1.0,) * layers, stages)
            assert [block for span in partition for block in span] == list(range(layers))
            assert all(partition)


def test_partition_minimizes_the_most_expensive_stage():
    for head_cost in (0.0, 1.5, 100.0):
        costs = (1.25, *[1.0] * 6, 1.0 + head_cost)
        for stages in (2, 3, 4):
            max_cost = max(sum(costs[block] for block in span) for span in partition_blocks(costs, stages))
            other_partitions = [
                max(sum(costs[a:b]) for a, b in zip([0, *boundaries], [*boundaries, len(costs)], strict=True))
                for boundaries in combinations(range(1, len(costs)), stages - 1)
            ]
            assert max_cost == min(other_partitions)


def test_large_head_gives_the_last_stage_fewer_blocks():
    sizes = [len(span) for span in partition_blocks((*[1.0] * 15, 4.0), 4)]
    assert sizes[-1] < sizes[0]
    assert [len(span) for span in partition_blocks((1.0,) * 16, 4)] == [4, 4, 4, 4]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="3 pipeline stages need at least as many blocks, and the model has 2"):
        partition_blocks((1.0, 1.0), 3)
