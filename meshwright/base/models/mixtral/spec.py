"""The spec of the Mixtral family: experts whose weights sum to one, and no routing bias by default. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.config import ModelConfig
from meshwright.base.models.decoder_spec import DecoderVariant, HeadSize, Window, declare_decoder, resolve_head_size
from meshwright.base.models.routing import Routing
from meshwright.base.models.spec import ModelSpec
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class MixtralOptions:
    """The settings of the family itself, `[model.options]`."""

    head_size: HeadSize = 0
    """size of one head, an even number; 0: width / heads"""
    window: Window = 0
    """tokens that every token sees, itself included; 0: all before it"""
    routing_bias: bool = False
    """balance experts by a routing bias (model.router_bias_rate), which a Hugging Face folder cannot store"""


OPTIONS = MixtralOptions


def variant(config: ModelConfig, options: MixtralOptions) -> DecoderVariant:
    """The decoder of the family."""
    return DecoderVariant(
        resolve_head_size(config, options.head_size),
        window=options.window or None,
        routing=Routing(updates_bias=options.routing_bias),
    )


def declare(config: ModelConfig, options: MixtralOptions) -> ModelSpec:
    if not config.experts:
        raise ConfigError(
            "model.experts = 0, and the family mixtral has experts", "try model.experts = 8, or model.family = mistral"
        )
    if config.experts_shared:
        raise ConfigError(
            f"model.experts_shared = {config.experts_shared}, and the family mixtral has no shared experts",
            "try model.experts_shared = 0, or model.family = llama",
        )
    return declare_decoder(config, variant(config, options))
