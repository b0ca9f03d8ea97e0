"""The spec of the Llama family, with the scaling of rotary frequencies. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat, Range
from meshwright.base.models.decoder_spec import DecoderVariant, RopeScaling, declare_decoder, resolve_head_size
from meshwright.base.models.spec import ModelSpec
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class LlamaOptions:
    """The settings of the family itself, `[model.options]`."""

    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """scaling of the rotary frequencies; the settings below are those of the scaling"""
    rope_factor: PositiveFloat = 8.0
    """low frequencies are divided by it; all frequencies with linear scaling"""
    rope_low_frequency_factor: PositiveFloat = 1.0
    """llama3: a frequency is low if its wavelength is above rope_original_context divided by this"""
    rope_high_frequency_factor: PositiveFloat = 4.0
    """llama3: a frequency is high, and kept, if its wavelength is below rope_original_context divided by this"""
    rope_original_context: Annotated[int, Range(minimum=1, maximum=1 << 40)] = 8192
    """llama3: tokens of the sequences of the first training"""


OPTIONS = LlamaOptions


def variant(config: ModelConfig, options: LlamaOptions) -> DecoderVariant:
    """The decoder of the family."""
    scaling = None
    if options.rope_scaling != "none":
        scaling = RopeScaling(
            options.rope_scaling,
            options.rope_factor,
            options.rope_low_frequency_factor,
            options.rope_high_frequency_factor,
            options.rope_original_context,
        )
    return DecoderVariant(resolve_head_size(config), rope_scaling=scaling)


def declare(config: ModelConfig, options: LlamaOptions) -> ModelSpec:
    if options.rope_high_frequency_factor <= options.rope_low_frequency_factor:
        raise ConfigError(
            f"model.options.rope_high_frequency_factor = {options.rope_high_frequency_factor} is not above "
            f"model.options.rope_low_frequency_factor = {options.rope_low_frequency_factor}",
            "expected a larger rope_high_frequency_factor",
        )
    return declare_decoder(config, variant(config, options))
