"""Which blocks each stage of a pipeline has: contiguous runs whose dearest is as cheap as possible, ends counted."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from meshwright.config import ModelConfig
from meshwright.errors import ConfigError


def block_cost(model: ModelConfig, sequence: int) -> float:
    """Products of one token's forward pass through a block; attention looks back over half of the sequence."""
    kv = model.kv_heads * (model.width // model.heads)
    attention = 2 * model.width * (model.width + kv) + model.width * sequence
    visited = model.experts_active + model.experts_shared if model.experts else 1
    return attention + 3 * model.width * model.ffn * visited + model.width * model.experts


def embedding_and_head_cost(model: ModelConfig) -> tuple[float, float]:
    """Of the embedding, which is looked up, and of the head."""
    return float(model.width), float(model.width * model.vocab)


@lru_cache(maxsize=64)
def partition_blocks(model: ModelConfig, sequence: int, stages: int) -> tuple[range, ...]:
    """The blocks of every stage, worked out once. Each has at least one; of equally good divisions the one with the
    fullest first.
    """
    if stages > model.layers:
        raise ConfigError(
            f"{stages} stages of a pipeline need as many blocks, and model.layers = {model.layers}",
            f"allowed: at most {model.layers} stages (layout.pipeline x pipeline.stages)",
        )
    first, last = embedding_and_head_cost(model)
    costs = [block_cost(model, sequence)] * model.layers
    costs[0] += first
    costs[-1] += last
    sums = [0.0, *accumulate(costs)]
    # best[i]: the dearest stage when blocks from i on are divided over the stages that are left
    best = [sums[-1] - sums[i] for i in range(model.layers)] + [float("inf")]
    cuts: list[list[int]] = []
    for left in range(2, stages + 1):
        choices = [
            min((max(sums[cut] - sums[i], best[cut]), -cut) for cut in range(i + 1, model.layers - left + 2))
            if i <= model.layers - left
            else (float("inf"), 0)
            for i in range(model.layers + 1)
        ]
        best = [cost for cost, _ in choices]
        cuts.insert(0, [-cut for _, cut in choices])
    begins = [0]
    for choice in cuts:
        begins.append(choice[begins[-1]])
    return tuple(range(begin, end) for begin, end in zip(begins, [*begins[1:], model.layers], strict=True))
