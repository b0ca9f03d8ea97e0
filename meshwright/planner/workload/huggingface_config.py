"""Published models: the `config.json` of Hugging Face's families in, an Architecture out; torch-free.

The file is a stranger's: it is read as JSON of bounded size, and every number in it has a range. Parameter counts are
those of the models' own code, which tests hold them to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from meshwright.config.constraints import PositiveFloat, Range
from meshwright.config.reader import convert, format_value
from meshwright.errors import ConfigError
from meshwright.io import read_regular_file
from meshwright.planner.workload.architecture import Architecture, LatentAttention

MAX_CONFIG_BYTES = 1 << 20
"""Bytes; a config is a page."""

Layers = Annotated[int, Range(minimum=1, maximum=1 << 12)]
Heads = Annotated[int, Range(minimum=1, maximum=1 << 14)]
Width = Annotated[int, Range(minimum=1, maximum=1 << 20)]
Vocabulary = Annotated[int, Range(minimum=2, maximum=1 << 24)]
Experts = Annotated[int, Range(minimum=1, maximum=1 << 14)]
Some = Annotated[int, Range(minimum=0, maximum=1 << 14)]
Tokens = Annotated[int, Range(minimum=1, maximum=1 << 31)]

NEEDED = object()
"""In the place of a default: the file must have the key."""


@dataclass(frozen=True)
class HuggingFaceConfig:
    architecture: Architecture
    rope_theta: float
    norm_eps: float
    activation: str
    ignored_features: tuple[str, ...] = ()
    """what the architecture does not say of the model, in words"""


def read_huggingface_config(path: Path) -> HuggingFaceConfig:
    """A `config.json`, or the folder that it lies in."""
    file = path / "config.json" if path.is_dir() else path
    name = file.absolute().parent.name if file.name == "config.json" else file.stem
    return parse_huggingface_config(read_config(file), str(file), name)


def read_config(file: Path) -> Any:
    text = read_regular_file(file, MAX_CONFIG_BYTES, str(file), "a model's config.json")
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}", "allowed: a model's config.json") from None


def parse_huggingface_config(tree: Any, file: str, name: str = "") -> HuggingFaceConfig:
    """`file` is what refusals call it."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file} holds {format_value(tree)}", "allowed: a JSON object with model_type and sizes")
    fields = Fields(tree, file)
    family = fields.text("model_type", NEEDED)
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{file}: model_type = {format_value(family)} is not known", f"allowed: {known}")
    found = replace(FAMILIES[family](fields), name=name or family)
    checked(found, file)
    return HuggingFaceConfig(found, fields.rope_theta(), fields.epsilon(), fields.activation(), tuple(left_out(fields)))


def checked(model: Architecture, file: str) -> None:
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"{file}: num_key_value_heads = {model.kv_heads} does not divide num_attention_heads = {model.heads}",
            "allowed: a divisor",
        )
    if model.experts_active > model.experts:
        raise ConfigError(
            f"{file}: num_experts_per_tok = {model.experts_active} exceeds the {model.experts} experts",
            f"allowed: from 1 to {model.experts}",
        )
    if model.dense_layers > model.layers:
        raise ConfigError(
            f"{file}: {model.dense_layers} dense layers exceed num_hidden_layers = {model.layers}",
            f"allowed: from 0 to {model.layers}",
        )


@dataclass(frozen=True)
class Fields:
    """The keys of one file, each taken as the type and range that it must have."""

    tree: Mapping[str, Any]
    file: str

    def take(self, kind: Any, default: Any, *keys: str) -> Any:
        """The first of the keys that the file has; null is as good as absent."""
        for key in keys:
            if self.tree.get(key) is not None:
                return convert(kind, self.tree[key], f"{self.file}: {key}")
        if default is NEEDED:
            raise ConfigError(f"{self.file} has no {keys[0]}", f"allowed: a config.json with {keys[0]}")
        return default

    def number(self, kind: Any, *keys: str, default: Any = NEEDED) -> int:
        found: int = self.take(kind, default, *keys)
        return found

    def flag(self, key: str, default: bool) -> bool:
        found: bool = self.take(bool, default, key)
        return found

    def text(self, key: str, default: Any) -> str:
        found: str = self.take(str, default, key)
        return found

    def table(self, *keys: str) -> Mapping[str, Any]:
        for key in keys:
            value = self.tree.get(key)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{self.file}: {key} = {format_value(value)} is a value", "allowed: an object, or null"
                )
            if value:
                return value
        return {}

    def rope_theta(self) -> float:
        """Newer files keep it in a table of its own."""
        found: float | None = self.take(PositiveFloat, None, "rope_theta", "rotary_emb_base")
        inner = Fields(self.table("rope_parameters"), f"{self.file}: rope_parameters")
        return found if found is not None else float(inner.take(PositiveFloat, 10_000.0, "rope_theta"))

    def epsilon(self) -> float:
        return float(self.take(PositiveFloat, 1e-5, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))

    def activation(self) -> str:
        return self.text("hidden_act" if "hidden_act" in self.tree else "activation_function", "silu")


def left_out(fields: Fields) -> list[str]:
    said = []
    scaling = fields.table("rope_scaling", "rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling and kind != "default":
        said.append(f"rotary positions are scaled ({format_value(kind)})")
    if fields.take(Some, 0, "num_nextn_predict_layers"):
        said.append("layers that predict further tokens (MTP)")
    if fields.flag("use_sliding_window", False):
        said.append("the sliding window of some layers")
    return said


def decoder(fields: Fields) -> Architecture:
    """What most families share: RMSNorm, gated feed-forward, grouped heads, rotary positions."""
    width = fields.number(Width, "hidden_size")
    heads = fields.number(Heads, "num_attention_heads")
    head = fields.number(Width, "head_dim", default=width // heads)
    if not head or (fields.tree.get("head_dim") is None and width % heads):
        raise ConfigError(
            f"{fields.file}: num_attention_heads = {heads} does not divide hidden_size = {width}",
            "allowed: a divisor, or a head_dim",
        )
    return Architecture(
        fields.text("model_type", NEEDED),
        fields.number(Layers, "num_hidden_layers"),
        width,
        heads,
        fields.number(Heads, "num_key_value_heads", default=heads),
        head,
        fields.number(Width, "intermediate_size"),
        fields.number(Vocabulary, "vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def biased(model: Architecture, attention: bool, ffn: bool = False) -> Architecture:
    return replace(model, qkv_bias=attention, out_bias=attention, ffn_bias=ffn)


def llama(fields: Fields) -> Architecture:
    return biased(decoder(fields), fields.flag("attention_bias", False), fields.flag("mlp_bias", False))


def mistral(fields: Fields) -> Architecture:
    """A file that does not speak of a window means the family's usual one; null means none."""
    window = fields.number(Tokens, "sliding_window", default=0 if "sliding_window" in fields.tree else 4096)
    return replace(decoder(fields), sliding_window=window)


def mixtral(fields: Fields) -> Architecture:
    model = decoder(fields)
    return replace(
        model,
        sliding_window=fields.number(Tokens, "sliding_window", default=0),
        experts=fields.number(Experts, "num_local_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=model.ffn,
    )


def qwen2(fields: Fields) -> Architecture:
    return replace(decoder(fields), qkv_bias=True)


def qwen3(fields: Fields) -> Architecture:
    return replace(biased(decoder(fields), fields.flag("attention_bias", False)), qk_norm=True)


def qwen_experts(model: Architecture, fields: Fields) -> Architecture:
    regular(fields, "decoder_sparse_step")
    dense = fields.tree.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ConfigError(
            f"{fields.file}: mlp_only_layers = {format_value(dense)} is not known",
            "allowed: the first layers, from 0 on",
        )
    return replace(
        model,
        experts=fields.number(Experts, "num_experts", "num_local_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=fields.number(Width, "moe_intermediate_size"),
        dense_layers=len(dense),
    )


def qwen2_moe(fields: Fields) -> Architecture:
    model = qwen_experts(replace(decoder(fields), qkv_bias=fields.flag("qkv_bias", True)), fields)
    shared = fields.number(Width, "shared_expert_intermediate_size")
    if shared % model.expert_ffn:
        raise ConfigError(
            f"{fields.file}: shared_expert_intermediate_size = {shared} is no multiple of moe_intermediate_size = "
            f"{model.expert_ffn}",
            "allowed: a multiple",
        )
    return replace(model, experts_shared=shared // model.expert_ffn, shared_expert_gate=True)


def qwen3_moe(fields: Fields) -> Architecture:
    return qwen_experts(qwen3(fields), fields)


def deepseek(fields: Fields) -> Architecture:
    """Routers' biases, by which tokens choose, are buffers and not counted."""
    regular(fields, "moe_layer_freq")
    if fields.flag("attention_bias", False):
        raise ConfigError(f"{fields.file}: attention_bias = true is not known in this family", "allowed: false")
    latent = LatentAttention(
        fields.number(Width, "q_lora_rank", default=0),
        fields.number(Width, "kv_lora_rank"),
        fields.number(Width, "qk_nope_head_dim"),
        fields.number(Width, "qk_rope_head_dim"),
        fields.number(Width, "v_head_dim"),
    )
    inner = {**fields.tree, "head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim, "num_key_value_heads": None}
    model = replace(decoder(replace(fields, tree=inner)), latent_attention=latent)
    experts = fields.number(Experts, "n_routed_experts", "num_local_experts", default=0)
    if not experts:
        return model
    return replace(
        model,
        experts=experts,
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        experts_shared=fields.number(Some, "n_shared_experts", default=0),
        expert_ffn=fields.number(Width, "moe_intermediate_size"),
        dense_layers=fields.number(Some, "first_k_dense_replace", default=0),
    )


def regular(fields: Fields, key: str) -> None:
    """Every layer after the dense ones has experts."""
    if (step := fields.number(Layers, key, default=1)) != 1:
        raise ConfigError(f"{fields.file}: {key} = {step} mixes layers with and without experts", "allowed: 1")


def gpt2(fields: Fields) -> Architecture:
    width = fields.number(Width, "n_embd", "hidden_size")
    heads = fields.number(Heads, "n_head", "num_attention_heads")
    if width % heads:
        raise ConfigError(f"{fields.file}: n_head = {heads} does not divide n_embd = {width}", "allowed: a divisor")
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


def gpt_neox(fields: Fields) -> Architecture:
    model = replace(
        decoder(fields), gated=False, norm="layer", parallel_residual=fields.flag("use_parallel_residual", True)
    )
    return biased(model, fields.flag("attention_bias", True), True)


FAMILIES: dict[str, Callable[[Fields], Architecture]] = {
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
}
"""Named as `model_type` names them."""
