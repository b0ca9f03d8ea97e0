"""Llama as Hugging Face folders store it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat
from meshwright.base.config.reader import format_value
from meshwright.base.models.config_fields import REQUIRED, ConfigFields, Tokens
from meshwright.base.models.huggingface import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    StoredParameter,
    decoder_parameters,
    read_decoder,
    require_no_experts,
    write_decoder,
)
from meshwright.base.models.llama.spec import LlamaOptions
from meshwright.errors import ConfigError

ROPE_SCALINGS = ("default", "linear", "llama3")


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields)
    head_size = section["width"] // section["heads"]
    fields.require("head_dim", head_size, head_size)
    fields.require("hidden_act", "silu", "silu")
    fields.require("attention_bias", False, False)
    fields.require("mlp_bias", False, False)
    return section | {"options": read_rope_scaling(fields)}


def read_rope_scaling(fields: ConfigFields) -> dict[str, Any]:
    """The options of the scaling that `rope_scaling` says, or in newer files `rope_parameters`."""
    key = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    scaling = ConfigFields(fields.table(key), f"{fields.file}: {key}")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_SCALINGS:
        raise ConfigError(
            f"{scaling.file}: rope_type = {format_value(kind)} is not supported",
            f"expected one of {', '.join(ROPE_SCALINGS)}",
        )
    fields.require("partial_rotary_factor", 1.0, 1.0)
    scaling.require("partial_rotary_factor", 1.0, 1.0)
    scaling.read.add("rope_theta")
    options: dict[str, Any] = {}
    if kind != "default":
        options = {"rope_scaling": kind, "rope_factor": float(scaling.get(PositiveFloat, REQUIRED, "factor"))}
    if kind == "llama3":
        context = fields.number(Tokens, "max_position_embeddings", default=2048)
        options |= {
            "rope_low_frequency_factor": float(scaling.get(PositiveFloat, REQUIRED, "low_freq_factor")),
            "rope_high_frequency_factor": float(scaling.get(PositiveFloat, REQUIRED, "high_freq_factor")),
            "rope_original_context": scaling.number(Tokens, "original_max_position_embeddings", default=context),
        }
    scaling.require_all_read()
    return options


def write_rope_scaling(options: LlamaOptions) -> dict[str, Any]:
    if options.rope_scaling == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": options.rope_scaling, "factor": options.rope_factor}
    if options.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": options.rope_low_frequency_factor,
            "high_freq_factor": options.rope_high_frequency_factor,
            "original_max_position_embeddings": options.rope_original_context,
        }
    return {"rope_scaling": scaling}


def write_config(config: ModelConfig, options: LlamaOptions) -> dict[str, Any]:
    require_no_experts(config)
    head_size = config.width // config.heads
    return write_decoder(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": head_size,
        "hidden_act": "silu",
        **write_rope_scaling(options),
    }


def stored_parameters(config: ModelConfig, _options: LlamaOptions) -> Iterator[StoredParameter]:
    return decoder_parameters(config, NORMS | ATTENTION | FEED_FORWARD)
