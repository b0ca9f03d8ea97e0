"""Mixtral as Hugging Face folders store it: one tensor for each matrix of each expert. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.models.config_fields import ConfigFields, Experts
from meshwright.base.models.huggingface import (
    ATTENTION,
    NORMS,
    StoredParameter,
    decoder_parameters,
    read_decoder,
    read_head_size,
    read_window,
    write_decoder,
)
from meshwright.base.models.mixtral.spec import MixtralOptions, variant
from meshwright.errors import ConfigError

ROUTER = {"ffn.router": "block_sparse_moe.gate"}
EXPERT_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields, kv_heads=8, norm_eps=1e-5, rope_theta=1e6)
    fields.require("hidden_act", "silu", "silu")
    fields.require("router_jitter_noise", 0.0, 0.0)
    fields.require_plain_rope()
    fields.read.add("router_aux_loss_coef")  # training balances experts by model.router_aux_loss
    return section | {
        "experts": fields.number(Experts, "num_local_experts", default=8),
        "experts_active": fields.number(Experts, "num_experts_per_tok", default=2),
        "options": read_head_size(fields, section) | read_window(fields, None),
    }


def write_config(config: ModelConfig, options: MixtralOptions) -> dict[str, Any]:
    if options.routing_bias:
        raise ConfigError(
            "model.options.routing_bias = true: Hugging Face models of the family mixtral have no routing bias",
            "try --format safetensors, which stores parameters by their own names",
        )
    decoder = variant(config, options)
    return write_decoder(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": decoder.head_size,
        "hidden_act": "silu",
        "sliding_window": decoder.window,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_active,
    }


def stored_parameters(config: ModelConfig, _options: MixtralOptions) -> Iterator[StoredParameter]:
    yield from decoder_parameters(config, NORMS | ATTENTION | ROUTER)
    for layer in range(config.layers):
        for ours, theirs in EXPERT_MATRICES.items():
            for expert in range(config.experts):
                stored = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{theirs}.weight"
                yield StoredParameter(f"decoder.blocks.{layer}.ffn.bank.{ours}", stored, expert)
