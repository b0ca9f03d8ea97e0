"""The module of the Llama family."""

from __future__ import annotations

from meshwright.base.config import ModelConfig
from meshwright.base.models.llama.spec import LlamaOptions, variant
from meshwright.core.models.layers.decoder import Decoder, LanguageModel


def build(config: ModelConfig, options: LlamaOptions) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
