"""The module of the Qwen 3 family."""

from __future__ import annotations

from meshwright.base.config import ModelConfig
from meshwright.base.models.qwen3.spec import Qwen3Options, variant
from meshwright.core.models.layers.decoder import Decoder, LanguageModel


def build(config: ModelConfig, options: Qwen3Options) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
