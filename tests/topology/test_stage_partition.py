"""The partition of blocks into pipeline stages: consecutive, not empty, and optimal."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from meshwright.config import ModelConfig
from meshwright.topology.stage_partition import model_costs, partition_blocks

MODEL = ModelConfig(layers=8, width=64, vocab=256, ffn=176)


def test_stages_are_consecutive_and_not_empty():
    for layers in (1, 2, 5, 8, 13):
        for stages in range(1, layers + 1):
            partition = partition_blocks(model_costs(replace(MODEL, layers=layers), 128), stages)
            assert [block for span in partition for block in span] == list(range(layers))
            assert all(partition)


def test_partition_minimizes_the_most_expensive_stage():
    for vocab in (16, 256, 4096, 60000):
        model = replace(MODEL, vocab=vocab)
        costs = model_costs(model, 128)
        for stages in (2, 3, 4):
            max_cost = max(sum(costs[block] for block in span) for span in partition_blocks(costs, stages))
            other_partitions = [
                max(sum(costs[a:b]) for a, b in zip([0, *boundaries], [*boundaries, model.layers], strict=True))
                for boundaries in combinations(range(1, model.layers), stages - 1)
            ]
            assert max_cost == min(other_partitions)


def test_large_vocabulary_gives_the_last_stage_fewer_blocks():
    sizes = [len(span) for span in partition_blocks(model_costs(replace(MODEL, vocab=4096, layers=16), 128), 4)]
    assert sizes[-1] < sizes[0]
    assert [len(span) for span in partition_blocks(model_costs(replace(MODEL, vocab=2, layers=16), 128), 4)] == [
        4,
        4,
        4,
        4,
    ]
