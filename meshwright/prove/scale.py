"""A config at a size that fits anywhere: structure and axes kept, sizes and degrees small, and what was scaled said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.config import LayoutConfig, ModelConfig, RunConfig
from meshwright.layout import Layout, stages_each

RANKS = 8
"""At most so many processes for a proof."""


def shrunk(config: RunConfig, layout: Layout) -> tuple[ModelConfig, str]:
    """The same structure, still divisible by the axes; rows of the matrices do not divide evenly among shards, so that
    padding is proven too.
    """
    model, tensor = config.model, layout.tensor
    parts = tensor * (layout.context if config.context.method == "all-to-all" else 1)
    ratio = min(model.heads // model.kv_heads, 4 if parts < 4 else 2)
    kv_heads = min(model.kv_heads, max(1, 4 // ratio)) if parts == 1 else parts
    heads = kv_heads * ratio
    small: dict[str, Any] = {
        "vocab": min(model.vocab, -(-250 // tensor) * tensor),
        "width": min(model.width // heads // 2 * 2, 16 if heads <= 4 else 4) * heads or 2 * heads,
        "layers": min(model.layers, max(2, layout.pipeline * stages_each(config))),
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": min(model.ffn, -(-90 // tensor) * tensor),
        "separator": None if model.separator is None else 0,
        "experts": min(model.experts, -(-4 // layout.expert) * layout.expert),
        "experts_active": min(model.experts_active, 4, model.experts or 4),
    }
    return replace(model, **small), changed(model, small)


def few_ranks(config: LayoutConfig, most: int = RANKS) -> tuple[LayoutConfig, str]:
    """The same axes on at most so many ranks; one rank alone proves nothing of ranks, and becomes two."""
    layout = Layout.of(config)
    small: dict[str, Any] = {}
    if layout.ranks > most:
        axes = ("replicate", "shard_degree", "pipeline", "context", "tensor")
        small = {axis: 2 for axis in axes if (getattr(config, axis) or 1) > 1}
        for axis in list(small)[: max(0, len(small) - most.bit_length() + 1)]:
            small[axis] = 1 if axis != "shard_degree" or small.get("replicate") != 1 else 2
        small["expert"] = min(config.expert, 2, Layout.of(replace(config, **small)).fold)
    elif layout.ranks == 1:
        small = {"replicate": 2}
    return replace(config, **small), changed(config, small)


def changed(before: Any, values: dict[str, Any]) -> str:
    pairs = [(key, getattr(before, key), value) for key, value in values.items()]
    return ", ".join(f"{key} {old} to {new}" for key, old, new in pairs if old != new)
