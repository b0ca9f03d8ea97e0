"""Mistral as Hugging Face folders store it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.models.config_fields import ConfigFields
from meshwright.base.models.huggingface import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    StoredParameter,
    decoder_parameters,
    read_decoder,
    read_head_size,
    read_window,
    write_decoder,
)
from meshwright.base.models.mistral.spec import MistralOptions, variant


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields, kv_heads=8)
    fields.require("hidden_act", "silu", "silu")
    fields.require_plain_rope()
    return section | {"options": read_head_size(fields, section) | read_window(fields, 4096)}


def write_config(config: ModelConfig, options: MistralOptions) -> dict[str, Any]:
    decoder = variant(config, options)
    return write_decoder(config) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": decoder.head_size,
        "hidden_act": "silu",
        "sliding_window": decoder.window,
    }


def stored_parameters(config: ModelConfig, _options: MistralOptions) -> Iterator[StoredParameter]:
    return decoder_parameters(config, NORMS | ATTENTION | FEED_FORWARD)
