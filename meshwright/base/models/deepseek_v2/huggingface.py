"""DeepSeek-V2 as Hugging Face folders store it: one tensor for each matrix of each expert. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat
from meshwright.base.config.reader import format_value
from meshwright.base.models.config_fields import REQUIRED, ConfigFields, Experts, OptionalCount, Tokens, Width
from meshwright.base.models.deepseek_v2.options import DeepSeekV2Options, Scale
from meshwright.base.models.huggingface import NORMS, StoredParameter, decoder_parameters, read_decoder, write_decoder
from meshwright.errors import ConfigError

QUERIES = {"attention.q": "self_attn.q_proj"}
COMPRESSED_QUERIES = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
}
KEYS_AND_VALUES = {
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.out": "self_attn.o_proj",
}
MATRICES = ("gate", "up", "down")
ROPE_SCALING = {
    "rope_factor": ("factor", PositiveFloat),
    "rope_beta_fast": ("beta_fast", PositiveFloat),
    "rope_beta_slow": ("beta_slow", PositiveFloat),
    "rope_mscale": ("mscale", Scale),
    "rope_mscale_all_dim": ("mscale_all_dim", Scale),
}
"""options -> keys of `rope_scaling` with their types"""


def read_config(fields: ConfigFields) -> dict[str, Any]:
    section = read_decoder(fields)
    fields.require("hidden_act", "silu", "silu")
    fields.require("attention_bias", False, False)
    fields.require("mlp_bias", False, False)
    fields.require("moe_layer_freq", 1, 1)
    fields.require("scoring_func", "softmax", "softmax")
    fields.require("norm_topk_prob", False, False)  # transformers ignores it, and DeepSeek's own code does not
    fields.require("seq_aux", True, True)
    fields.read.add("ep_size")
    options = {
        "q_lora_rank": fields.number(Width, "q_lora_rank", default=0 if "q_lora_rank" in fields.tree else 1536),
        "kv_lora_rank": fields.number(Width, "kv_lora_rank", default=512),
        "qk_nope_head_dim": fields.number(Width, "qk_nope_head_dim", default=128),
        "qk_rope_head_dim": fields.number(Width, "qk_rope_head_dim", default=64),
        "v_head_dim": fields.number(Width, "v_head_dim", default=128),
        "dense_layers": fields.number(OptionalCount, "first_k_dense_replace", default=0),
        "dense_ffn": section["ffn"],
        "routed_scale": float(fields.get(PositiveFloat, 1.0, "routed_scaling_factor")),
    }
    fields.require("head_dim", options["qk_rope_head_dim"], options["qk_rope_head_dim"])
    head_size = options["qk_nope_head_dim"] + options["qk_rope_head_dim"]
    fields.require("qk_head_dim", head_size, head_size)
    section |= {
        "ffn": fields.number(Width, "moe_intermediate_size", default=1407),
        "experts": fields.number(Experts, "n_routed_experts", "num_experts", default=64),
        "experts_active": fields.number(Experts, "num_experts_per_tok"),
        "experts_shared": fields.number(OptionalCount, "n_shared_experts", default=2),
        "options": options | read_groups(fields) | read_rope_scaling(fields),
    }
    alpha = fields.get(Scale, None, "aux_loss_alpha")
    return section if alpha is None else section | {"router_aux_loss": float(alpha)}


def read_groups(fields: ConfigFields) -> dict[str, int]:
    """The options of the groups of experts; the method `greedy` has none, whatever the other keys are."""
    groups = fields.number(Experts, "n_group", default=1)
    active = fields.number(Experts, "topk_group", default=1)
    method = fields.text("topk_method", "greedy")
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise ConfigError(
            f"{fields.file}: topk_method = {format_value(method)} is not supported",
            "expected greedy or group_limited_greedy",
        )
    return {"groups": groups, "groups_active": active}


def read_rope_scaling(fields: ConfigFields) -> dict[str, Any]:
    """The options of the scaling, from `rope_scaling` or from `rope_parameters`, which newer files have."""
    fields.require("partial_rotary_factor", 1.0, 1.0)
    older, newer = fields.table("rope_scaling"), fields.table("rope_parameters")
    scaling = ConfigFields(older or newer, f"{fields.file}: {'rope_scaling' if older else 'rope_parameters'}")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    scaling.read.add("rope_theta")
    scaling.require("partial_rotary_factor", 1.0, 1.0)
    if kind == "default":
        scaling.require_all_read()
        return {}
    if kind != "yarn":
        raise ConfigError(f"{scaling.file}: type = {format_value(kind)} is not supported", "expected default or yarn")
    scaling.require("truncate", True, True)
    scaling.get(PositiveFloat, REQUIRED, "factor")
    options: dict[str, Any] = {
        option: float(scaling.get(kind, getattr(DeepSeekV2Options, option), key))
        for option, (key, kind) in ROPE_SCALING.items()
    }
    context = fields.number(Tokens, "max_position_embeddings", default=2048)
    options["rope_original_context"] = scaling.number(Tokens, "original_max_position_embeddings", default=context)
    scaling.require_all_read()
    return {"rope_scaling": "yarn"} | options


def write_config(config: ModelConfig, options: DeepSeekV2Options) -> dict[str, Any]:
    if options.routing_bias:
        raise ConfigError(
            "model.options.routing_bias = true: Hugging Face models of the family deepseek_v2 have no routing bias",
            "try --format safetensors, which stores parameters by their own names",
        )
    sizes = options.latent_attention(config)
    written = write_decoder(config) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "q_lora_rank": sizes.q_lora_rank or None,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "head_dim": sizes.qk_rope_head_dim,
        "intermediate_size": options.dense_inner(config),
        "moe_intermediate_size": config.ffn,
        "first_k_dense_replace": options.dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.experts_active,
        "n_shared_experts": config.experts_shared,
        "routed_scaling_factor": options.routed_scale,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy" if options.groups == 1 else "group_limited_greedy",
        "n_group": options.groups,
        "topk_group": options.groups_active,
        "aux_loss_alpha": config.router_aux_loss,
        "seq_aux": True,
    }
    if options.rope_scaling == "none":
        return written
    values = {key: getattr(options, option) for option, (key, _) in ROPE_SCALING.items()}
    context = options.rope_original_context
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": context} | values
    longest = round(options.rope_factor * context)
    return written | {"rope_scaling": scaling, "max_position_embeddings": longest}


def stored_parameters(config: ModelConfig, options: DeepSeekV2Options) -> Iterator[StoredParameter]:
    queries = COMPRESSED_QUERIES if options.q_lora_rank else QUERIES
    yield from decoder_parameters(config, NORMS | queries | KEYS_AND_VALUES)
    for layer in range(config.layers):
        ours, theirs = f"decoder.blocks.{layer}", f"model.layers.{layer}.mlp"
        if layer < options.dense_layers:
            for name in MATRICES:
                yield StoredParameter(f"{ours}.dense_ffn.{name}.weight", f"{theirs}.{name}_proj.weight")
            continue
        yield StoredParameter(f"{ours}.ffn.router.weight", f"{theirs}.gate.weight")
        for name in MATRICES:
            for expert in range(config.experts):
                stored = f"{theirs}.experts.{expert}.{name}_proj.weight"
                yield StoredParameter(f"{ours}.ffn.bank.{name}", stored, expert)
            if config.experts_shared:
                stored = f"{theirs}.shared_experts.{name}_proj.weight"
                yield StoredParameter(f"{ours}.ffn.shared.{name}.weight", stored)
