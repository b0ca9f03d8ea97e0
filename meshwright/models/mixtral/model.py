"""The module of the Mixtral family."""

from __future__ import annotations

from meshwright.config import ModelConfig
from meshwright.models.layers.decoder import Decoder, LanguageModel
from meshwright.models.mixtral.spec import MixtralOptions, variant


def build(config: ModelConfig, options: MixtralOptions) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
