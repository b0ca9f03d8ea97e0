"""The spec of the Mistral family: a head size of its own, and a sliding window. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.config import ModelConfig
from meshwright.base.models.decoder_spec import (
    DecoderVariant,
    HeadSize,
    Window,
    declare_decoder,
    require_no_experts,
    resolve_head_size,
)
from meshwright.base.models.spec import ModelSpec


@dataclass(frozen=True)
class MistralOptions:
    """The settings of the family itself, `[model.options]`."""

    head_size: HeadSize = 0
    """size of one head, an even number; 0: width / heads"""
    window: Window = 0
    """tokens that every token sees, itself included; 0: all before it"""


OPTIONS = MistralOptions


def variant(config: ModelConfig, options: MistralOptions) -> DecoderVariant:
    """The decoder of the family."""
    return DecoderVariant(resolve_head_size(config, options.head_size), window=options.window or None)


def declare(config: ModelConfig, options: MistralOptions) -> ModelSpec:
    require_no_experts(config)
    return declare_decoder(config, variant(config, options))
