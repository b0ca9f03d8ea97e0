"""Reads the `config.json` of Hugging Face model families as an `Architecture`; torch-free.

The file is untrusted: it is JSON of bounded size, and every number in it has a range. Parameter counts equal those of
the models' own code, which tests check. A family that Meshwright trains needs no function here: its own reader gives
the architecture. To plan another one, add one function and one row to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.config.reader import format_value
from meshwright.base.models import registry
from meshwright.base.models.architecture import Architecture, LatentAttention
from meshwright.base.models.config_fields import (
    REQUIRED,
    ConfigFields,
    Experts,
    Heads,
    Layers,
    OptionalCount,
    Tokens,
    Vocabulary,
    Width,
    read_config_file,
)
from meshwright.errors import ConfigError
from meshwright.planner.workload.decoder_config import (
    decoder,
    require_moe_in_every_layer,
    with_biases,
    with_qwen_experts,
)
from meshwright.planner.workload.hybrid_config import HYBRID_FAMILIES


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A published model."""

    architecture: Architecture
    """the sizes of the model"""
    model_config: ModelConfig | None
    """the settings with which a family of Meshwright computes the model; None if no family does"""
    notes: tuple[str, ...] = ()
    """why no family computes the model, and features that `architecture` does not describe"""


def read_huggingface_config(path: Path) -> HuggingFaceConfig:
    """Reads a `config.json`, or the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    name = file.absolute().parent.name if file.name == "config.json" else file.stem
    return parse_huggingface_config(read_config_file(file), str(file), name)


def parse_huggingface_config(tree: Any, file: str, name: str = "") -> HuggingFaceConfig:
    """Parses the content of a config.json; `file` is its name in error messages."""
    fields = ConfigFields.of(tree, file)
    family = fields.text("model_type", REQUIRED)
    if family not in FAMILIES:
        if family not in registry.FAMILIES:
            known = ", ".join(dict.fromkeys((*FAMILIES, *registry.FAMILIES)))
            raise ConfigError(f"{file}: model_type = {format_value(family)} is unknown", f"expected one of {known}")
        model_config = registry.read_huggingface_model(fields)
        return HuggingFaceConfig(registry.model_architecture(model_config, name or family), model_config)
    architecture = replace(FAMILIES[family](fields), name=name or family)
    validate(architecture, file)
    ignored = [f"ignored: {feature}" for feature in ignored_features(fields)]
    try:
        return HuggingFaceConfig(
            architecture, registry.read_huggingface_model(ConfigFields.of(tree, file)), tuple(ignored)
        )
    except ConfigError as error:
        return HuggingFaceConfig(architecture, None, (f"Meshwright cannot train it: {error.message}", *ignored))


def validate(model: Architecture, file: str) -> None:
    """Raises ConfigError if sizes contradict each other."""
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"{file}: num_key_value_heads = {model.kv_heads} does not divide num_attention_heads = {model.heads}",
            "expected a divisor",
        )
    if model.experts_active > model.experts:
        raise ConfigError(
            f"{file}: num_experts_per_tok = {model.experts_active} exceeds the {model.experts} experts",
            f"expected 1 to {model.experts}",
        )
    if model.dense_layers > model.layers:
        raise ConfigError(
            f"{file}: {model.dense_layers} dense layers exceed num_hidden_layers = {model.layers}",
            f"expected 0 to {model.layers}",
        )


def ignored_features(fields: ConfigFields) -> list[str]:
    """Lists features of the model that an `Architecture` does not describe."""
    ignored = []
    if fields.get(OptionalCount, 0, "num_nextn_predict_layers"):
        ignored.append("multi-token prediction layers (MTP)")
    if fields.flag("use_sliding_window", False) and fields.text("model_type", "") not in HYBRID_FAMILIES:
        ignored.append("sliding-window attention of some layers")
    return ignored


def llama(fields: ConfigFields) -> Architecture:
    return with_biases(decoder(fields), fields.flag("attention_bias", False), fields.flag("mlp_bias", False))


def mistral(fields: ConfigFields) -> Architecture:
    """A file without `sliding_window` means the family's default; null means no window."""
    window = fields.number(Tokens, "sliding_window", default=0 if "sliding_window" in fields.tree else 4096)
    return replace(decoder(fields), sliding_window=window)


def mixtral(fields: ConfigFields) -> Architecture:
    model = decoder(fields)
    return replace(
        model,
        sliding_window=fields.number(Tokens, "sliding_window", default=0),
        experts=fields.number(Experts, "num_local_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=model.ffn,
    )


def qwen2(fields: ConfigFields) -> Architecture:
    return replace(decoder(fields), qkv_bias=True)


def qwen3(fields: ConfigFields) -> Architecture:
    """A file of a dense model without `head_dim` means 128."""
    tree = {**fields.tree, "head_dim": fields.number(Width, "head_dim", default=128)}
    return qwen3_decoder(replace(fields, tree=tree))


def qwen3_decoder(fields: ConfigFields) -> Architecture:
    return replace(with_biases(decoder(fields), fields.flag("attention_bias", False)), qk_norm=True)


def qwen2_moe(fields: ConfigFields) -> Architecture:
    model = replace(decoder(fields), qkv_bias=fields.flag("qkv_bias", True))
    return with_qwen_experts(model, fields, gated_shared=True)


def qwen3_moe(fields: ConfigFields) -> Architecture:
    return with_qwen_experts(qwen3_decoder(fields), fields)


DEEPSEEK_DEFAULTS = {
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2, "first_k_dense_replace": 0},
    "deepseek_v3": {
        "q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4
    },
}  # fmt: skip
"""What a file without these keys means, which is not the same as null."""


def deepseek(fields: ConfigFields) -> Architecture:
    """The bias of a router, which steers the choice of experts, is a buffer and not counted as a parameter."""
    require_moe_in_every_layer(fields, "moe_layer_freq")
    if fields.flag("attention_bias", False):
        raise ConfigError(f"{fields.file}: attention_bias = true is not supported for this family", "expected false")
    fields = replace(fields, tree={**DEEPSEEK_DEFAULTS[fields.text("model_type", REQUIRED)], **fields.tree})
    latent_attention = LatentAttention(
        fields.number(Width, "q_lora_rank", default=0),
        fields.number(Width, "kv_lora_rank"),
        fields.number(Width, "qk_nope_head_dim"),
        fields.number(Width, "qk_rope_head_dim"),
        fields.number(Width, "v_head_dim"),
    )
    head_dim = latent_attention.qk_nope_head_dim + latent_attention.qk_rope_head_dim
    tree = {**fields.tree, "head_dim": head_dim, "num_key_value_heads": None}
    model = replace(decoder(replace(fields, tree=tree)), latent_attention=latent_attention)
    no_experts = 0 if "n_routed_experts" in fields.tree else REQUIRED  # null means a dense model
    experts = fields.number(Experts, "n_routed_experts", "num_local_experts", default=no_experts)
    if not experts:
        return model
    expert_ffn = fields.number(Width, "moe_intermediate_size")
    return replace(
        model,
        experts=experts,
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=fields.number(OptionalCount, "n_shared_experts", default=0) * expert_ffn,
        dense_layers=fields.number(OptionalCount, "first_k_dense_replace", default=0),
        routing_groups=fields.number(OptionalCount, "n_group", default=0),
        routing_groups_active=fields.number(OptionalCount, "topk_group", default=0),
    )


def gpt2(fields: ConfigFields) -> Architecture:
    width = fields.number(Width, "n_embd", "hidden_size")
    heads = fields.number(Heads, "n_head", "num_attention_heads")
    if width % heads:
        raise ConfigError(f"{fields.file}: n_head = {heads} does not divide n_embd = {width}", "expected a divisor")
    return Architecture(
        "gpt2",
        fields.number(Layers, "n_layer", "num_hidden_layers"),
        width,
        heads,
        heads,
        width // heads,
        fields.number(Width, "n_inner", default=4 * width),
        fields.number(Vocabulary, "vocab_size"),
        gated=False,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        norm="layer",
        bias=True,
        learned_positions=fields.number(Tokens, "n_positions", "max_position_embeddings"),
    )


def gpt_neox(fields: ConfigFields) -> Architecture:
    """It has as many key as query heads."""
    parallel_residual = fields.flag("use_parallel_residual", True)
    fields = replace(fields, tree={**fields.tree, "num_key_value_heads": None})
    model = replace(decoder(fields), gated=False, norm="layer", parallel_residual=parallel_residual)
    return with_biases(model, fields.flag("attention_bias", True), True)


FAMILIES: dict[str, Callable[[ConfigFields], Architecture]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    **HYBRID_FAMILIES,
}
"""`model_type` -> the function that reads the config."""
