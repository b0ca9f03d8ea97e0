"""Scales a config down to a size that runs anywhere: the structure and the axes stay, sizes and degrees shrink."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from meshwright.config import LayoutConfig, ModelConfig, RunConfig
from meshwright.topology.axes import ALL_AXES
from meshwright.topology.layout import Layout, stages_per_rank

MAX_RANKS = 8
"""The most processes that a check starts."""
DROP_ORDER = ("replicate", "shard", "pipeline", "context", "tensor")
"""The axes in the order in which a layout with too many of them loses them."""


def scale_model(config: RunConfig, layout: Layout) -> tuple[ModelConfig, str]:
    """The model with the same structure and small sizes that the axes still divide, and a description of the changes.
    The rows of the matrices do not divide evenly among shards, so that padding is checked too. If the model has fewer
    key heads than attention ranks, the small model has, too.
    """
    model, tensor = config.model, layout.tensor
    attention_ranks = tensor * (layout.context if config.context.method == "all-to-all" else 1)
    ratio = min(model.heads // model.kv_heads, 4 if attention_ranks < 4 else 2)
    kv_ranks = attention_ranks if model.kv_heads % attention_ranks == 0 else tensor
    kv_heads = kv_ranks if kv_ranks > 1 else min(model.kv_heads, max(1, 4 // ratio))
    heads = lcm(kv_heads * ratio, attention_ranks)
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


def scale_sequence(config: RunConfig, layout: Layout, min_tokens: int) -> int:
    """The shortest sequence of at least `min_tokens` tokens that divides into equal sequence chunks; ring attention
    needs two chunks per rank.
    """
    chunks = layout.context * (2 if layout.context > 1 and config.context.method == "ring" else 1)
    return round_up(min_tokens, lcm(chunks, layout.context * layout.tensor))


def scale_layout(config: LayoutConfig, max_ranks: int = MAX_RANKS) -> tuple[LayoutConfig, str]:
    """The layout on at most `max_ranks` ranks, and a description of the changes. Every axis has degree two; with
    too many axes, those that come first in `DROP_ORDER` are dropped. A single rank becomes two replicas, since one rank
    has nothing to check.
    """
    layout = Layout.from_config(config)
    small: dict[str, Any] = {}
    if layout.ranks > max_ranks:
        used = [axis for axis in DROP_ORDER if getattr(layout, axis) > 1]
        kept = used[-(max_ranks.bit_length() - 1) :]
        degree = {axis: 2 if axis in kept else 1 for axis in ALL_AXES}
        reused_axes = [axis for axis in ("shard", "replicate", "context") if degree[axis] > 1]
        if layout.expert > 1 and reused_axes:
            degree["expert"] = 2
            if layout.expert_axes_size > layout.expert and 2 ** len(kept) < max_ranks:
                degree[reused_axes[0]] = 4  # so that several ranks have the same experts
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
    """The smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


def describe_changes(before: Any, values: dict[str, Any]) -> str:
    """The fields whose values differ: "width 128 to 64, layers 4 to 2"."""
    pairs = [(key, getattr(before, key), value) for key, value in values.items()]
    return ", ".join(f"{key} {old} to {new}" for key, old, new in pairs if old != new)
