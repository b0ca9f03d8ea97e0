"""The spec of the Qwen 2 family (also Qwen 2.5): biases of queries, keys and values. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.config import ModelConfig
from meshwright.base.models.decoder_spec import DecoderVariant, declare_decoder, require_no_experts, resolve_head_size
from meshwright.base.models.spec import ModelSpec


@dataclass(frozen=True)
class Qwen2Options:
    """The family has no settings besides those of every model."""


OPTIONS = Qwen2Options


def variant(config: ModelConfig, _options: Qwen2Options) -> DecoderVariant:
    """The decoder of the family."""
    return DecoderVariant(resolve_head_size(config), qkv_bias=True)


def declare(config: ModelConfig, options: Qwen2Options) -> ModelSpec:
    require_no_experts(config)
    return declare_decoder(config, variant(config, options))
