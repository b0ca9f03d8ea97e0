"""The module of the Mixtral family."""

from __future__ import annotations

from meshwright.base.config import ModelConfig
from meshwright.base.models.mixtral.spec import MixtralOptions, variant
from meshwright.core.models.layers.decoder import Decoder, LanguageModel


def build(config: ModelConfig, options: MixtralOptions) -> LanguageModel:
    return LanguageModel(config, Decoder(config, variant(config, options)))
