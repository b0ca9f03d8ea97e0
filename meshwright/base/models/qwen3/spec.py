"""The spec of the dense Qwen 3 family: a head size of its own, and norms of queries and keys. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.config import ModelConfig
from meshwright.base.models.decoder_spec import (
    DecoderVariant,
    HeadSize,
    declare_decoder,
    require_no_experts,
    resolve_head_size,
)
from meshwright.base.models.spec import ModelSpec


@dataclass(frozen=True)
class Qwen3Options:
    """The settings of the family itself, `[model.options]`."""

    head_size: HeadSize = 0
    """size of one head, an even number; 0: width / heads"""


OPTIONS = Qwen3Options


def variant(config: ModelConfig, options: Qwen3Options) -> DecoderVariant:
    """The decoder of the family."""
    return DecoderVariant(resolve_head_size(config, options.head_size), qk_norm=True)


def declare(config: ModelConfig, options: Qwen3Options) -> ModelSpec:
    require_no_experts(config)
    return declare_decoder(config, variant(config, options))
