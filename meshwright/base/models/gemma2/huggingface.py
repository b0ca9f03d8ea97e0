"""Gemma 2 as Hugging Face folders store it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat
from meshwright.base.config.reader import format_value
from meshwright.base.models.config_fields import ConfigFields, Tokens, Width
from meshwright.base.models.gemma2.spec import Gemma2Options
from meshwright.base.models.huggingface import (
    ATTENTION,
    FEED_FORWARD,
    StoredParameter,
    decoder_parameters,
    read_decoder,
    write_decoder,
)
from meshwright.errors import ConfigError

MODULES = (
    {"attention_norm": "input_layernorm"}
    | ATTENTION
    | {"attention_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    | FEED_FORWARD
    | {"ffn_post_norm": "post_feedforward_layernorm"}
)


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields, tie=True)
    for key in ("hidden_activation", "hidden_act"):
        fields.require(key, "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    fields.require("attention_bias", False, False)
    fields.require("use_bidirectional_attention", False, False)
    fields.require_plain_rope()
    require_alternating_layers(fields, section["layers"])
    return section | {
        "options": {
            "head_size": fields.number(Width, "head_dim", default=256),
            "query_scale": float(fields.get(PositiveFloat, 256.0, "query_pre_attn_scalar")),
            "attention_softcap": read_softcap(fields, "attn_logit_softcapping", 50.0),
            "logit_softcap": read_softcap(fields, "final_logit_softcapping", 30.0),
            "window": fields.number(Tokens, "sliding_window", default=4096),
        }
    }


def read_softcap(fields: ConfigFields, key: str, default: float) -> float:
    """A file without the key means the default; null means no cap, which the family does not compute."""
    if key in fields.tree and fields.tree[key] is None:
        raise ConfigError(f"{fields.file}: {key} = null is not supported", "expected a number")
    return float(fields.get(PositiveFloat, default, key))


def require_alternating_layers(fields: ConfigFields, layers: int) -> None:
    """Raises ConfigError unless the first, third, ... layer has the sliding window, and no other."""
    fields.read.add("layer_types")
    expected = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if (found := fields.tree.get("layer_types")) not in (None, expected):
        raise ConfigError(
            f"{fields.file}: layer_types = {format_value(found)} is not supported",
            "expected sliding_attention and full_attention in turn, one for each layer",
        )


def write_config(config: ModelConfig, options: Gemma2Options) -> dict[str, Any]:
    head_size = options.head_dim(config)
    scale = options.query_scale or float(head_size)
    return write_decoder(config) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scale) if scale.is_integer() else scale,
        "attn_logit_softcapping": options.attention_softcap,
        "final_logit_softcapping": options.logit_softcap,
        "sliding_window": options.window,
    }


def stored_parameters(config: ModelConfig, _options: Gemma2Options) -> Iterator[StoredParameter]:
    return decoder_parameters(config, MODULES)
