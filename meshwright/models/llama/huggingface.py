"""Llama as Hugging Face folders store it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.config import ModelConfig
from meshwright.models.config_fields import ConfigFields
from meshwright.models.huggingface import (
    ATTENTION,
    FEED_FORWARD,
    StoredParameter,
    decoder_parameters,
    read_decoder,
    require_no_experts,
    write_decoder,
)
from meshwright.models.llama.spec import LlamaOptions

MODULES = {"attention_norm": "input_layernorm"} | ATTENTION | {"ffn_norm": "post_attention_layernorm"} | FEED_FORWARD


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields)
    head_size = section["width"] // section["heads"]
    fields.require("head_dim", head_size, head_size)
    fields.require("hidden_act", "silu", "silu")
    fields.require("attention_bias", False, False)
    fields.require("mlp_bias", False, False)
    fields.require_plain_rope()
    return section


def write_config(config: ModelConfig, _options: LlamaOptions) -> dict[str, Any]:
    require_no_experts(config)
    head_size = config.width // config.heads
    return write_decoder(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": head_size,
        "hidden_act": "silu",
    }


def stored_parameters(config: ModelConfig, _options: LlamaOptions) -> Iterator[StoredParameter]:
    return decoder_parameters(config, MODULES)
