"""Partitions blocks into pipeline stages so that the most expensive stage is as cheap as possible. Torch-free."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from meshwright.config import ModelConfig
from meshwright.errors import ConfigError


def block_cost(model: ModelConfig, sequence: int) -> float:
    """Multiply-adds per token of a block's forward pass; causal attention covers half of the sequence on average."""
    kv_width = model.kv_heads * (model.width // model.heads)
    attention = 2 * model.width * (model.width + kv_width) + model.width * sequence
    experts_per_token = model.experts_active + model.experts_shared if model.experts else 1
    return attention + 3 * model.width * model.ffn * experts_per_token + model.width * model.experts


def embedding_and_head_cost(model: ModelConfig) -> tuple[float, float]:
    """Costs per token, in the units of `block_cost`; the embedding is a lookup of one row."""
    return float(model.width), float(model.width * model.vocab)


def model_costs(model: ModelConfig, sequence: int) -> tuple[float, ...]:
    """The cost of every block of the configured model; the first includes the embedding, the last the head."""
    embedding_cost, head_cost = embedding_and_head_cost(model)
    costs = [block_cost(model, sequence)] * model.layers
    costs[0] += embedding_cost
    costs[-1] += head_cost
    return tuple(costs)


@lru_cache(maxsize=64)
def partition_blocks(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """The consecutive blocks of every stage; every stage has at least one. Of equally good partitions, the one with the
    most blocks in the first stages is taken. `costs` has one entry per block.
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
