"""The module of the Llama family."""

from __future__ import annotations

from meshwright.config import ModelConfig
from meshwright.models.layers.decoder import LanguageModel
from meshwright.models.llama.spec import LlamaOptions, variant


def build(config: ModelConfig, options: LlamaOptions) -> LanguageModel:
    return LanguageModel(config, variant(config, options))
