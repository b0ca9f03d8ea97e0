"""Reads the `config.json` of hybrid Hugging Face families, whose layers are of several kinds; torch-free.

| family | layers |
|---|---|
| gemma3_text | sliding windows, with full attention in every sixth layer |
| gpt_oss | sliding windows and full attention in turn, all with experts |
| qwen3_next | three gated delta nets, then full attention with a gate, with experts but in `mlp_only_layers` |
| nemotron_h | one sublayer each, by the letters of a pattern: M (Mamba-2), * (attention), - (dense), E (experts) |
| jamba | Mamba with attention in every eighth layer, experts in every second one |

Meshwright plans these models and trains none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from meshwright.base.config.reader import format_value
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind, LinearAttention, Mixer, StateSpace
from meshwright.base.models.config_fields import (
    REQUIRED,
    ConfigFields,
    Experts,
    Heads,
    Layers,
    OptionalCount,
    OptionalWidth,
    Tokens,
    Width,
)
from meshwright.errors import ConfigError
from meshwright.planner.workload.decoder_config import decoder, with_biases, with_qwen_experts

LAYER_TYPES: dict[Mixer, str] = {"window": "sliding_attention", "linear": "linear_attention"}
"""The mixer of layers without full attention -> its entry in `layer_types`."""
PATTERN_LETTERS: dict[str, BlockKind] = {
    "M": BlockKind("mamba2", "none"),
    "*": BlockKind("attention", "none"),
    "-": BlockKind("none", "dense"),
    "E": BlockKind("none", "moe"),
}
"""A letter of `hybrid_override_pattern` -> the kind of the layer."""
BLOCK_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
"""An entry of `layers_block_type`, which newer files of Nemotron-H have -> its letter."""


def mixers(fields: ConfigFields, layers: int, period: int, local: Mixer) -> tuple[Mixer, ...]:
    """The mixer of every layer: that of `layer_types`, or else `local` with full attention in every `period`-th one."""
    listed = fields.tree.get("layer_types")
    if listed is None:
        return tuple("attention" if (layer + 1) % period == 0 else local for layer in range(layers))
    known: dict[str, Mixer] = {"full_attention": "attention", LAYER_TYPES[local]: local}
    return tuple(known[name] for name in listed_types(fields, "layer_types", listed, known, layers))


def listed_types(fields: ConfigFields, key: str, listed: Any, known: Iterable[str], layers: int) -> list[str]:
    """The entries of a list with a known name for every layer."""
    names = list(known)  # an entry of an untrusted list need not be hashable
    if not isinstance(listed, list) or len(listed) != layers or any(name not in names for name in listed):
        raise ConfigError(
            f"{fields.file}: {key} = {format_value(listed)} is not supported",
            f"expected {layers} of {', '.join(names)}",
        )
    return listed


def with_mixers(model: Architecture, mixers: tuple[Mixer, ...]) -> Architecture:
    """Replaces attention by the mixer of each layer, whose feed-forward it keeps."""
    kinds = (BlockKind(mixer, model.block_kind(layer).ffn) for layer, mixer in enumerate(mixers))
    return replace(model, layer_kinds=tuple(kinds), dense_layers=0)


def gemma3_text(fields: ConfigFields) -> Architecture:
    tree = {"tie_word_embeddings": True, "head_dim": 256, **fields.tree}
    model = with_biases(decoder(replace(fields, tree=tree)), fields.flag("attention_bias", False))
    period = fields.number(Layers, "sliding_window_pattern", "_sliding_window_pattern", default=6)
    window = fields.number(Tokens, "sliding_window", default=4096)
    model = replace(model, sliding_window=window, qk_norm=True, post_norms=True)
    return with_mixers(model, mixers(fields, model.layers, period, "window"))


def gpt_oss(fields: ConfigFields) -> Architecture:
    fields = replace(fields, tree={"head_dim": 64, **fields.tree})
    model = with_biases(decoder(fields), fields.flag("attention_bias", True))
    model = replace(
        model,
        sliding_window=fields.number(Tokens, "sliding_window", default=128),
        attention_sinks=True,
        expert_bias=True,
        experts=fields.number(Experts, "num_local_experts", "num_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok", "experts_per_token"),
        expert_ffn=model.ffn,
    )
    return with_mixers(model, mixers(fields, model.layers, 2, "window"))


def qwen3_next(fields: ConfigFields) -> Architecture:
    fields = replace(fields, tree={"shared_expert_intermediate_size": 512, "head_dim": 256, **fields.tree})
    model = with_biases(decoder(fields), fields.flag("attention_bias", False))
    model = replace(
        with_qwen_experts(model, fields, gated_shared=True),
        qk_norm=True,
        attention_gate=True,
        linear_attention=LinearAttention(
            fields.number(Heads, "linear_num_key_heads", default=16),
            fields.number(Heads, "linear_num_value_heads", default=32),
            fields.number(Width, "linear_key_head_dim", default=128),
            fields.number(Width, "linear_value_head_dim", default=128),
            fields.number(Heads, "linear_conv_kernel_dim", default=4),
        ),
    )
    period = fields.number(Layers, "full_attention_interval", default=4)
    return with_mixers(model, mixers(fields, model.layers, period, "linear"))


def layer_pattern(fields: ConfigFields) -> str:
    """The letters of the layers of Nemotron-H."""
    listed = fields.tree.get("layers_block_type")
    if listed is not None:
        layers = len(listed) if isinstance(listed, list) else 1
        pattern = "".join(
            BLOCK_LETTERS[name] for name in listed_types(fields, "layers_block_type", listed, BLOCK_LETTERS, layers)
        )
    else:
        pattern = fields.text("hybrid_override_pattern", REQUIRED)
    if not pattern or len(pattern) > MAX_PATTERN or set(pattern) - set(PATTERN_LETTERS):
        raise ConfigError(
            f"{fields.file}: hybrid_override_pattern = {format_value(pattern)} is not supported",
            f"expected letters of {' '.join(PATTERN_LETTERS)}, one per layer",
        )
    return pattern


def nemotron_h(fields: ConfigFields) -> Architecture:
    """Its feed-forward is a squared ReLU, without a gate."""
    pattern = layer_pattern(fields)
    for key in ("mlp_bias", "use_bias", "mamba_proj_bias", "tie_word_embeddings"):
        fields.require(key, False, default=False)
    fields.require("use_conv_bias", True, default=True)
    if (latent := fields.tree.get("moe_latent_size")) is not None:
        raise ConfigError(f"{fields.file}: moe_latent_size = {format_value(latent)} is not supported", "expected null")
    tree = {**fields.tree, "num_hidden_layers": len(pattern)}
    tree["head_dim"] = fields.number(Width, "attention_head_dim", "head_dim", default=128)
    model = replace(decoder(replace(fields, tree=tree)), gated=False)
    heads = fields.number(Heads, "mamba_num_heads", default=128)
    space = StateSpace(
        heads * fields.number(Width, "mamba_head_dim", default=64),
        fields.number(Width, "ssm_state_size", default=128),
        fields.number(Heads, "conv_kernel", default=4),
        heads,
        fields.number(Heads, "n_groups", default=8),
        chunk=fields.number(Width, "chunk_size", default=128),
    )
    model = replace(model, state_space=space, layer_kinds=tuple(PATTERN_LETTERS[letter] for letter in pattern))
    if "E" not in pattern:
        return model
    return replace(
        model,
        experts=fields.number(Experts, "n_routed_experts", "num_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=fields.number(Width, "moe_intermediate_size"),
        shared_ffn=fields.number(OptionalWidth, "moe_shared_expert_intermediate_size"),
    )


def jamba(fields: ConfigFields) -> Architecture:
    fields.require("mamba_proj_bias", False, default=False)
    fields.require("mamba_conv_bias", True, default=True)
    model = decoder(fields)
    period = fields.number(Layers, "attn_layer_period", default=8)
    offset = fields.number(OptionalCount, "attn_layer_offset", default=4)
    expert_period = fields.number(Layers, "expert_layer_period", default=2)
    expert_offset = fields.number(OptionalCount, "expert_layer_offset", default=1)
    experts = fields.number(Experts, "num_experts", default=16)
    kinds = tuple(
        BlockKind(
            "attention" if layer % period == offset else "mamba",
            "moe" if experts > 1 and layer % expert_period == expert_offset else "dense",
        )
        for layer in range(model.layers)
    )
    rank = fields.tree.get("mamba_dt_rank")
    space = StateSpace(
        fields.number(Heads, "mamba_expand", default=2) * model.width,
        fields.number(Width, "mamba_d_state", default=16),
        fields.number(Heads, "mamba_d_conv", default=4),
        rank=-(-model.width // 16) if rank in (None, "auto") else fields.number(Width, "mamba_dt_rank"),
        inner_norms=True,
    )
    is_moe = any(kind.ffn == "moe" for kind in kinds)
    return replace(
        model,
        layer_kinds=kinds,
        state_space=space,
        experts=experts if is_moe else 0,
        experts_active=fields.number(Experts, "num_experts_per_tok", default=2) if is_moe else 0,
        expert_ffn=model.ffn if is_moe else 0,
    )


MAX_PATTERN = 1 << 12
"""Limit on the layers of a pattern."""
HYBRID_FAMILIES: dict[str, Callable[[ConfigFields], Architecture]] = {
    "gemma3_text": gemma3_text,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "nemotron_h": nemotron_h,
    "jamba": jamba,
}
"""`model_type` -> the function that reads the config."""
