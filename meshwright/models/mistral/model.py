"""The module of the Mistral family."""

from __future__ import annotations

from meshwright.config import ModelConfig
from meshwright.models.layers.decoder import Decoder, LanguageModel
from meshwright.models.mistral.spec import MistralOptions, variant


def build(config: ModelConfig, options: MistralOptions) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
