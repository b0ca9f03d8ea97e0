"""The module of the Llama family."""

from __future__ import annotations

from meshwright.config import ModelConfig
from meshwright.models.layers.decoder import Decoder, LanguageModel
from meshwright.models.llama.spec import LlamaOptions, variant


def build(config: ModelConfig, options: LlamaOptions) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
