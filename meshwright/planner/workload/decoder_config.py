"""Reads the keys that most Hugging Face model families share; torch-free."""

from __future__ import annotations

from dataclasses import replace

from meshwright.base.config.reader import format_value
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind, FeedForward
from meshwright.base.models.config_fields import (
    REQUIRED,
    ConfigFields,
    Experts,
    Heads,
    Layers,
    OptionalWidth,
    Vocabulary,
    Width,
)
from meshwright.errors import ConfigError


def decoder(fields: ConfigFields) -> Architecture:
    """Reads what most families share: RMSNorm, gated feed-forward, grouped-query attention, rotary positions."""
    width = fields.number(Width, "hidden_size")
    heads = fields.number(Heads, "num_attention_heads")
    head_dim = fields.number(Width, "head_dim", default=width // heads)
    if not head_dim or (fields.tree.get("head_dim") is None and width % heads):
        raise ConfigError(
            f"{fields.file}: num_attention_heads = {heads} does not divide hidden_size = {width}",
            "expected a divisor, or head_dim",
        )
    return Architecture(
        fields.text("model_type", REQUIRED),
        fields.number(Layers, "num_hidden_layers"),
        width,
        heads,
        fields.number(Heads, "num_key_value_heads", default=heads),
        head_dim,
        fields.number(Width, "intermediate_size"),
        fields.number(Vocabulary, "vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def with_biases(model: Architecture, attention: bool, ffn: bool = False) -> Architecture:
    return replace(model, qkv_bias=attention, out_bias=attention, ffn_bias=ffn)


def qwen_feed_forwards(fields: ConfigFields, layers: int) -> tuple[FeedForward, ...]:
    """The feed-forward of every layer: every `decoder_sparse_step`-th one has experts, unless in `mlp_only_layers`."""
    step = fields.number(Layers, "decoder_sparse_step", default=1)
    listed = fields.tree.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in listed):
        raise ConfigError(
            f"{fields.file}: mlp_only_layers = {format_value(listed)} is not supported",
            f"expected a list of layers from 0 to {layers - 1}",
        )
    dense = set(listed)
    return tuple("dense" if layer in dense or (layer + 1) % step else "moe" for layer in range(layers))


def with_qwen_experts(model: Architecture, fields: ConfigFields, gated_shared: bool = False) -> Architecture:
    """Adds the experts of a Qwen model, with shared experts and their gate if it has any."""
    feed_forwards = qwen_feed_forwards(fields, model.layers)
    if "moe" not in feed_forwards:
        return model
    dense = feed_forwards.count("dense")
    kinds = () if "dense" not in feed_forwards[dense:] else tuple(BlockKind(ffn=ffn) for ffn in feed_forwards)
    return replace(
        model,
        experts=fields.number(Experts, "num_experts", "num_local_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=fields.number(Width, "moe_intermediate_size"),
        shared_ffn=fields.number(OptionalWidth, "shared_expert_intermediate_size") if gated_shared else 0,
        shared_expert_gate=gated_shared,
        dense_layers=0 if kinds else dense,
        layer_kinds=kinds,
    )


def require_moe_in_every_layer(fields: ConfigFields, key: str) -> None:
    """Raises ConfigError unless every layer after the leading dense ones has experts."""
    if (step := fields.number(Layers, key, default=1)) != 1:
        raise ConfigError(f"{fields.file}: {key} = {step} alternates dense and MoE layers", "expected 1")
