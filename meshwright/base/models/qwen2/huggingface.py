"""Qwen 2 as Hugging Face folders store it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.models.config_fields import ConfigFields
from meshwright.base.models.huggingface import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    PROJECTIONS,
    StoredParameter,
    decoder_parameters,
    read_decoder,
    require_no_window,
    write_decoder,
)
from meshwright.base.models.qwen2.spec import Qwen2Options


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields, kv_heads=32)
    head_size = section["width"] // section["heads"]
    fields.require("head_dim", head_size, head_size)
    fields.require("hidden_act", "silu", "silu")
    fields.require("use_mrope", False, False)
    require_no_window(fields)
    fields.require_plain_rope()
    return section


def write_config(config: ModelConfig, _options: Qwen2Options) -> dict[str, Any]:
    return write_decoder(config) | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def stored_parameters(config: ModelConfig, _options: Qwen2Options) -> Iterator[StoredParameter]:
    return decoder_parameters(config, NORMS | ATTENTION | FEED_FORWARD, PROJECTIONS)
