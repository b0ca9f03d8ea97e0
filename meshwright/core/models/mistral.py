"""The module of the Mistral family."""

from __future__ import annotations

from meshwright.base.config import ModelConfig
from meshwright.base.models.mistral.spec import MistralOptions, variant
from meshwright.core.models.layers.decoder import Decoder, LanguageModel


def build(config: ModelConfig, options: MistralOptions) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
