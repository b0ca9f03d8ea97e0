"""A config at a size that fits anywhere: structure and axes kept, sizes and degrees small, and what was scaled said."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from meshwright.config import LayoutConfig, ModelConfig, RunConfig
from meshwright.topology.axes import ALL_AXES
from meshwright.topology.layout import Layout, stages_per_rank

MAX_RANKS = 8
"""At most so many processes for a proof."""


def scale_model(config: RunConfig, layout: Layout) -> tuple[ModelConfig, str]:
    """The same structure, still divisible by the axes; rows of the matrices do not divide evenly among shards, so that
    padding is proven too. Key heads stay fewer than the ranks that attend where they were.
    """
    model, tensor = config.model, layout.tensor
    parts = tensor * (layout.context if config.context.method == "all-to-all" else 1)
    ratio = min(model.heads // model.kv_heads, 4 if parts < 4 else 2)
    kv_parts = parts if model.kv_heads % parts == 0 else tensor
    kv_heads = kv_parts if kv_parts > 1 else min(model.kv_heads, max(1, 4 // ratio))
    heads = lcm(kv_heads * ratio, parts)
    small: dict[str, Any] = {
        "vocab": round_up(min(model.vocab, 250), tensor),
        "width": min(model.width // heads // 2 * 2, 16 if heads <= 4 else 4) * heads or 2 * heads,
        "layers": min(model.layers, max(2, layout.pipeline * stages_per_rank(config))),
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": round_up(min(model.ffn, 90), tensor),
        "separator": None if model.separator is None else 0,
        "experts": round_up(min(model.experts, 4), layout.expert),
        "experts_active": min(model.experts_active, 4, model.experts or 4),
    }
    return replace(model, **small), describe_changes(model, small)


def scale_sequence(config: RunConfig, layout: Layout, least: int) -> int:
    """As many tokens at least, in equal pieces for all ranks; of the ring's each has two."""
    pieces = layout.context * (2 if layout.context > 1 and config.context.method == "ring" else 1)
    return round_up(least, lcm(pieces, layout.context * layout.tensor))


def scale_layout(config: LayoutConfig, most: int = MAX_RANKS) -> tuple[LayoutConfig, str]:
    """The same axes on at most so many ranks, each of degree two; the first of them go where there are too many. One
    rank alone proves nothing of ranks, and becomes two.
    """
    layout = Layout.from_config(config)
    small: dict[str, Any] = {}
    if layout.ranks > most:
        used = [axis for axis in ("replicate", "shard", "pipeline", "context", "tensor") if getattr(layout, axis) > 1]
        kept = used[-(most.bit_length() - 1) :]
        degree = {axis: 2 if axis in kept else 1 for axis in ALL_AXES}
        folded = [axis for axis in ("shard", "replicate", "context") if degree[axis] > 1]
        if layout.expert > 1 and folded:
            degree["expert"] = 2
            if layout.expert_axes_size > layout.expert and 2 ** len(kept) < most:
                degree[folded[0]] = 4  # ranks that hold the same experts, too
        small = {axis: degree[axis] for axis in ("pipeline", "context", "tensor", "expert")}
        if "shard" in kept and config.shard_degree is None:
            small["replicate"] = degree["shard"]
        elif "shard" in kept:
            small |= {"replicate": degree["replicate"], "shard_degree": degree["shard"]}
        else:
            small |= {"replicate": degree["replicate"], "shard": "none", "shard_degree": None}
    elif layout.ranks == 1:
        small = {"replicate": 2}
    return replace(config, **small), describe_changes(config, small)


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def describe_changes(before: Any, values: dict[str, Any]) -> str:
    pairs = [(key, getattr(before, key), value) for key, value in values.items()]
    return ", ".join(f"{key} {old} to {new}" for key, old, new in pairs if old != new)
