"""Qwen 3 as Hugging Face folders store it. Torch-free."""

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
    require_no_window,
    write_decoder,
)
from meshwright.base.models.qwen3.spec import Qwen3Options, variant

HEAD_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields, kv_heads=32)
    fields.require("attention_bias", False, False)
    fields.require("hidden_act", "silu", "silu")
    require_no_window(fields)
    fields.require_plain_rope()
    return section | {"options": read_head_size(fields, section, 128)}


def write_config(config: ModelConfig, options: Qwen3Options) -> dict[str, Any]:
    return write_decoder(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": variant(config, options).head_size,
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def stored_parameters(config: ModelConfig, _options: Qwen3Options) -> Iterator[StoredParameter]:
    return decoder_parameters(config, NORMS | ATTENTION | HEAD_NORMS | FEED_FORWARD)
