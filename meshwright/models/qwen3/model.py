"""The module of the Qwen 3 family."""

from __future__ import annotations

from meshwright.config import ModelConfig
from meshwright.models.layers.decoder import Decoder, LanguageModel
from meshwright.models.qwen3.spec import Qwen3Options, variant


def build(config: ModelConfig, options: Qwen3Options) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
