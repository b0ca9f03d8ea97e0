"""The module of the Qwen 2 family."""

from __future__ import annotations

from meshwright.base.config import ModelConfig
from meshwright.base.models.qwen2.spec import Qwen2Options, variant
from meshwright.core.models.layers.decoder import Decoder, LanguageModel


def build(config: ModelConfig, options: Qwen2Options) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
