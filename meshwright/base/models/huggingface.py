"""How a Hugging Face folder stores a model of a family: its config.json and the names of its tensors. Torch-free.

A family has a module `huggingface.py` with three functions:

    read_config(fields: ConfigFields) -> dict[str, Any]          the `[model]` section of a config.json
    write_config(config: ModelConfig, options) -> dict[str, Any] the config.json of a `[model]` section
    stored_parameters(config: ModelConfig, options) -> Iterator[StoredParameter]

The name of a family is the `model_type` of its config.json. `read_config` reads every key that changes what the model
computes, with the default that transformers gives it, and refuses values that the family does not compute; a key that
it does not read is refused too, unless it is one of INERT_KEYS (see config_fields.py). `stored_parameters` names every
parameter of the spec once; a tied copy is not a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat
from meshwright.base.config.reader import format_value
from meshwright.base.models.config_fields import ConfigFields, Heads, Layers, Tokens, Vocabulary, Width
from meshwright.errors import ConfigError

PROJECTIONS = {f"attention.{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")}
ATTENTION = PROJECTIONS | {"attention.out": "self_attn.o_proj"}
FEED_FORWARD = {f"ffn.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
"""The modules of a block, and their names in most Hugging Face models."""
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
"""The norms of a block that has one before attention and one before the feed-forward."""


@dataclass(frozen=True)
class StoredParameter:
    """Where a Hugging Face folder stores a parameter of a family, or the matrix of one expert of it."""

    name: str
    """the parameter, as in the spec of the family"""
    stored: str
    """the tensor of the folder"""
    expert: int | None = None
    """the index in the first dimension of the parameter that the tensor stores; None: all of the parameter"""
    transposed: bool = False
    """whether the folder stores the transpose"""
    rows: tuple[int, int] | None = None
    """the rows [start, stop) of the tensor, after transposition, that store the parameter; None: all rows"""


def read_decoder(
    fields: ConfigFields,
    *,
    tie: bool = False,
    kv_heads: int | None = None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10_000.0,
) -> dict[str, Any]:
    """The `[model]` section of what most families share. The other arguments are the values that a file of the family
    means if it lacks the key; `kv_heads` is None for the number of query heads, which null always means.
    """
    heads = fields.number(Heads, "num_attention_heads")
    without_key = heads if kv_heads is None or "num_key_value_heads" in fields.tree else kv_heads
    return {
        "vocab": fields.number(Vocabulary, "vocab_size"),
        "width": fields.number(Width, "hidden_size"),
        "layers": fields.number(Layers, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.number(Heads, "num_key_value_heads", default=without_key),
        "ffn": fields.number(Width, "intermediate_size"),
        "rope_theta": fields.rope_theta(rope_theta),
        "norm_eps": float(fields.get(PositiveFloat, norm_eps, "rms_norm_eps")),
        "tie": fields.flag("tie_word_embeddings", tie),
    }


def read_head_size(fields: ConfigFields, section: Mapping[str, Any], default: int = 0) -> dict[str, int]:
    """The option `head_size` of a `[model]` section, unless it is width / heads; `default` is that of `head_dim`."""
    plain = section["width"] // section["heads"]
    size = fields.number(Width, "head_dim", default=default or plain)
    return {} if size == plain else {"head_size": size}


def read_window(fields: ConfigFields, default: int | None) -> dict[str, int]:
    """The option `window`; null means no window, and a file without `sliding_window` the default of the family."""
    without_key = 0 if default is None or "sliding_window" in fields.tree else default
    window = fields.number(Tokens, "sliding_window", default=without_key)
    return {"window": window} if window else {}


def require_no_window(fields: ConfigFields) -> None:
    """Raises ConfigError if some layers of a Qwen model have a sliding window."""
    fields.require("use_sliding_window", False, False)
    fields.read.update(("sliding_window", "max_window_layers", "layer_types"))  # without effect, or checked here
    layer_types = fields.tree.get("layer_types")
    plain = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    if layer_types is not None and not plain:
        raise ConfigError(
            f"{fields.file}: layer_types = {format_value(layer_types)} is not supported",
            "expected full_attention for each layer",
        )


def write_decoder(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that `read_decoder` reads."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie,
    }


def decoder_parameters(
    config: ModelConfig, modules: Mapping[str, str], biases: Mapping[str, str] | None = None
) -> Iterator[StoredParameter]:
    """The weights of a decoder whose blocks have the `modules`: names in a block -> names in a layer of the folder, and
    the biases of those that have one.
    """
    yield StoredParameter("decoder.embedding.weight", "model.embed_tokens.weight")
    for layer in range(config.layers):
        for ours, theirs in modules.items():
            yield StoredParameter(f"decoder.blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight")
        for ours, theirs in (biases or {}).items():
            yield StoredParameter(f"decoder.blocks.{layer}.{ours}.bias", f"model.layers.{layer}.{theirs}.bias")
    yield StoredParameter("decoder.norm.weight", "model.norm.weight")
    if not config.tie:
        yield StoredParameter("head.weight", "lm_head.weight")


def require_no_experts(config: ModelConfig) -> None:
    """Raises ConfigError for a model with experts, which the Hugging Face form of its family does not have."""
    if config.experts:
        raise ConfigError(
            f"model.experts = {config.experts}: Hugging Face models of the family {config.family} have no experts",
            "try --format safetensors, which stores parameters by their own names",
        )
