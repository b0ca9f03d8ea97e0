"""The module of the Qwen 2 family."""

from __future__ import annotations

from meshwright.config import ModelConfig
from meshwright.models.layers.decoder import Decoder, LanguageModel
from meshwright.models.qwen2.spec import Qwen2Options, variant


def build(config: ModelConfig, options: Qwen2Options) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
