"""Reads the `config.json` of hybrid Hugging Face families, whose layers are of several kinds; torch-free.

| family | layers |
|---|---|
| gemma3_text | sliding windows, with full attention in every sixth layer |
| gpt_oss | sliding windows and full attention in turn, all with experts |
| qwen3_next | three gated delta nets, then full attention with a gate, all with experts |
| nemotron_h | one sublayer each, by the letters of a pattern: M (Mamba-2), * (attention), - (dense), E (experts) |
| jamba | Mamba with attention in every eighth layer, experts in every second one |

Meshwright plans these models and trains none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.config.reader import format_value
from meshwright.errors import ConfigError
from meshwright.models.architecture import Architecture
from meshwright.models.block_kinds import BlockKind, FeedForward, LinearAttention, Mixer, StateSpace
from meshwright.models.config_fields import ConfigFields, Experts, Heads, Layers, OptionalCount, Tokens, Width
from meshwright.planner.workload.decoder_config import decoder, with_biases, with_qwen_experts

LAYER_TYPES: dict[str, Mixer] = {
    "full_attention": "attention",
    "sliding_attention": "window",
    "linear_attention": "linear",
}
"""An entry of `layer_types` -> the mixer of the layer."""
PATTERN_LETTERS: dict[str, BlockKind] = {
    "M": BlockKind("mamba2", "none"),
    "*": BlockKind("attention", "none"),
    "-": BlockKind("none", "dense"),
    "E": BlockKind("none", "moe"),
}
"""A letter of `hybrid_override_pattern` -> the kind of the layer."""


def mixers(fields: ConfigFields, layers: int, period: int, local: Mixer) -> tuple[Mixer, ...]:
    """The mixer of every layer: that of `layer_types`, or else `local` with full attention in every `period`-th one."""
    listed = fields.tree.get("layer_types")
    if listed is None:
        return tuple("attention" if (layer + 1) % period == 0 else local for layer in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or any(kind not in list(LAYER_TYPES) for kind in listed):
        raise ConfigError(
            f"{fields.file}: layer_types = {format_value(listed)} is not supported",
            f"expected {layers} of {', '.join(LAYER_TYPES)}",
        )
    return tuple(LAYER_TYPES[kind] for kind in listed)


def with_mixers(model: Architecture, kinds: tuple[Mixer, ...], ffn: FeedForward) -> Architecture:
    return replace(model, layer_kinds=tuple(BlockKind(mixer, ffn) for mixer in kinds))


def gemma3_text(fields: ConfigFields) -> Architecture:
    tree = {"tie_word_embeddings": True, "head_dim": 256, **fields.tree}
    model = decoder(replace(fields, tree=tree))
    period = fields.number(Layers, "sliding_window_pattern", "_sliding_window_pattern", default=6)
    window = fields.number(Tokens, "sliding_window", default=4096)
    model = replace(model, sliding_window=window, qk_norm=True, post_norms=True)
    return with_mixers(model, mixers(fields, model.layers, period, "window"), "dense")


def gpt_oss(fields: ConfigFields) -> Architecture:
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
    return with_mixers(model, mixers(fields, model.layers, 2, "window"), "moe")


def qwen3_next(fields: ConfigFields) -> Architecture:
    model = with_qwen_experts(decoder(fields), fields)
    shared = fields.number(OptionalCount, "shared_expert_intermediate_size", default=512)
    if shared % model.expert_ffn:
        raise ConfigError(
            f"{fields.file}: shared_expert_intermediate_size = {shared} is not a multiple of moe_intermediate_size = "
            f"{model.expert_ffn}",
            "expected a multiple",
        )
    model = replace(
        model,
        qk_norm=True,
        attention_gate=True,
        experts_shared=shared // model.expert_ffn,
        shared_expert_gate=shared > 0,
        linear_attention=LinearAttention(
            fields.number(Heads, "linear_num_key_heads", default=16),
            fields.number(Heads, "linear_num_value_heads", default=32),
            fields.number(Width, "linear_key_head_dim", default=128),
            fields.number(Width, "linear_value_head_dim", default=128),
            fields.number(Heads, "linear_conv_kernel_dim", default=4),
        ),
    )
    period = fields.number(Layers, "full_attention_interval", default=4)
    return with_mixers(model, mixers(fields, model.layers, period, "linear"), "moe")


def nemotron_h(fields: ConfigFields) -> Architecture:
    """Its feed-forward is a squared ReLU, without a gate."""
    pattern = fields.text("hybrid_override_pattern", "")
    if not pattern or len(pattern) > MAX_PATTERN or set(pattern) - set(PATTERN_LETTERS):
        raise ConfigError(
            f"{fields.file}: hybrid_override_pattern = {format_value(pattern)} is not supported",
            f"expected letters of {' '.join(PATTERN_LETTERS)}, one per layer",
        )
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
    expert_ffn = fields.number(Width, "moe_intermediate_size")
    shared = fields.number(OptionalCount, "moe_shared_expert_intermediate_size", default=0)
    return replace(
        model,
        experts=fields.number(Experts, "n_routed_experts", "num_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        experts_shared=shared // expert_ffn,
    )


def jamba(fields: ConfigFields) -> Architecture:
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
