"""Reads the `config.json` of Hugging Face model families as an `Architecture`; torch-free.

The file is untrusted: it is JSON of bounded size, and every number in it has a range. Parameter counts equal those of
the models' own code, which tests check. To add a model family, add one function and one row to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from meshwright.config.constraints import PositiveFloat, Range
from meshwright.config.reader import convert, format_value
from meshwright.errors import ConfigError
from meshwright.io import parse_json, read_regular_file
from meshwright.models.architecture import Architecture, LatentAttention

MAX_CONFIG_BYTES = 1 << 20
"""Size limit of a config.json."""

Layers = Annotated[int, Range(minimum=1, maximum=1 << 12)]
Heads = Annotated[int, Range(minimum=1, maximum=1 << 14)]
Width = Annotated[int, Range(minimum=1, maximum=1 << 20)]
Vocabulary = Annotated[int, Range(minimum=2, maximum=1 << 24)]
Experts = Annotated[int, Range(minimum=1, maximum=1 << 14)]
OptionalCount = Annotated[int, Range(minimum=0, maximum=1 << 14)]
Tokens = Annotated[int, Range(minimum=1, maximum=1 << 31)]

REQUIRED = object()
"""Marks a key without a default: the file must have it."""


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A published model."""

    architecture: Architecture
    """the sizes of the model"""
    rope_theta: float
    """base of the rotary frequencies"""
    norm_eps: float
    """epsilon of the norms"""
    activation: str
    """activation function of the feed-forward, such as silu"""
    ignored_features: tuple[str, ...] = ()
    """features of the model that `architecture` does not describe"""


def read_huggingface_config(path: Path) -> HuggingFaceConfig:
    """Reads a `config.json`, or the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    name = file.absolute().parent.name if file.name == "config.json" else file.stem
    return parse_huggingface_config(read_config(file), str(file), name)


def read_config(file: Path) -> Any:
    """Reads the untrusted JSON file."""
    expected = "a model's config.json"
    return parse_json(read_regular_file(file, MAX_CONFIG_BYTES, str(file), expected), str(file), expected)


def parse_huggingface_config(tree: Any, file: str, name: str = "") -> HuggingFaceConfig:
    """Parses the content of a config.json; `file` is its name in error messages."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file} contains {format_value(tree)}", "expected a JSON object with model_type and sizes")
    fields = ConfigFields(tree, file)
    family = fields.text("model_type", REQUIRED)
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{file}: model_type = {format_value(family)} is unknown", f"expected one of {known}")
    architecture = replace(FAMILIES[family](fields), name=name or family)
    validate(architecture, file)
    ignored = tuple(ignored_features(fields))
    return HuggingFaceConfig(architecture, fields.rope_theta(), fields.norm_eps(), fields.activation(), ignored)


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


@dataclass(frozen=True)
class ConfigFields:
    """The keys of one config.json; each is read with the type and range that it must have."""

    tree: Mapping[str, Any]
    """the JSON object"""
    file: str
    """name of the file in error messages"""

    def get(self, kind: Any, default: Any, *keys: str) -> Any:
        """Returns the value of the first key that is present and not null, else the default."""
        for key in keys:
            if self.tree.get(key) is not None:
                return convert(kind, self.tree[key], f"{self.file}: {key}")
        if default is REQUIRED:
            raise ConfigError(f"{self.file} has no {keys[0]}", f"expected a config.json with {keys[0]}")
        return default

    def number(self, kind: Any, *keys: str, default: Any = REQUIRED) -> int:
        value: int = self.get(kind, default, *keys)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self.get(bool, default, key)
        return value

    def text(self, key: str, default: Any) -> str:
        value: str = self.get(str, default, key)
        return value

    def table(self, *keys: str) -> Mapping[str, Any]:
        """Returns the first of the keys that is a non-empty object; an empty one if there is none."""
        for key in keys:
            value = self.tree.get(key)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{self.file}: {key} = {format_value(value)} is a value", "expected an object or null"
                )
            if value:
                return value
        return {}

    def rope_theta(self) -> float:
        """Newer files have it in the object `rope_parameters`."""
        value: float | None = self.get(PositiveFloat, None, "rope_theta", "rotary_emb_base")
        nested = ConfigFields(self.table("rope_parameters"), f"{self.file}: rope_parameters")
        return value if value is not None else float(nested.get(PositiveFloat, 10_000.0, "rope_theta"))

    def norm_eps(self) -> float:
        return float(self.get(PositiveFloat, 1e-5, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))

    def activation(self) -> str:
        return self.text("hidden_act" if "hidden_act" in self.tree else "activation_function", "silu")


def ignored_features(fields: ConfigFields) -> list[str]:
    """Lists features of the model that an `Architecture` does not describe."""
    ignored = []
    scaling = fields.table("rope_scaling", "rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling and kind != "default":
        ignored.append(f"RoPE scaling ({format_value(kind)})")
    if fields.get(OptionalCount, 0, "num_nextn_predict_layers"):
        ignored.append("multi-token prediction layers (MTP)")
    if fields.flag("use_sliding_window", False):
        ignored.append("sliding-window attention of some layers")
    return ignored


def decoder(fields: ConfigFields) -> Architecture:
    """Reads what most families share: RMSNorm, gated feed-forward, grouped-query attention, rotary positions."""
    width = fields.number(Width, "hidden_size")
    heads = fields.number(Heads, "num_attention_heads")
    head_dim = fields.number(Width, "head_dim", default=width // heads)
    if not head_dim or (fields.tree.get("head_dim") is None and width % heads):
        raise ConfigError(
            f"{fields.file}: num_attention_heads = {heads} does not divide hidden_size = {width}",
            "expected a divisor, or head_dim",
        )
    return Architecture(
        fields.text("model_type", REQUIRED),
        fields.number(Layers, "num_hidden_layers"),
        width,
        heads,
        fields.number(Heads, "num_key_value_heads", default=heads),
        head_dim,
        fields.number(Width, "intermediate_size"),
        fields.number(Vocabulary, "vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def with_biases(model: Architecture, attention: bool, ffn: bool = False) -> Architecture:
    return replace(model, qkv_bias=attention, out_bias=attention, ffn_bias=ffn)


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
    return replace(with_biases(decoder(fields), fields.flag("attention_bias", False)), qk_norm=True)


def with_qwen_experts(model: Architecture, fields: ConfigFields) -> Architecture:
    require_moe_in_every_layer(fields, "decoder_sparse_step")
    dense = fields.tree.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ConfigError(
            f"{fields.file}: mlp_only_layers = {format_value(dense)} is not supported",
            "expected the first layers, from 0 on",
        )
    return replace(
        model,
        experts=fields.number(Experts, "num_experts", "num_local_experts"),
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        expert_ffn=fields.number(Width, "moe_intermediate_size"),
        dense_layers=len(dense),
    )


def qwen2_moe(fields: ConfigFields) -> Architecture:
    model = with_qwen_experts(replace(decoder(fields), qkv_bias=fields.flag("qkv_bias", True)), fields)
    shared = fields.number(Width, "shared_expert_intermediate_size")
    if shared % model.expert_ffn:
        raise ConfigError(
            f"{fields.file}: shared_expert_intermediate_size = {shared} is not a multiple of moe_intermediate_size = "
            f"{model.expert_ffn}",
            "expected a multiple",
        )
    return replace(model, experts_shared=shared // model.expert_ffn, shared_expert_gate=True)


def qwen3_moe(fields: ConfigFields) -> Architecture:
    return with_qwen_experts(qwen3(fields), fields)


def deepseek(fields: ConfigFields) -> Architecture:
    """The bias of a router, which steers the choice of experts, is a buffer and not counted as a parameter."""
    require_moe_in_every_layer(fields, "moe_layer_freq")
    if fields.flag("attention_bias", False):
        raise ConfigError(f"{fields.file}: attention_bias = true is not supported for this family", "expected false")
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
    experts = fields.number(Experts, "n_routed_experts", "num_local_experts", default=0)
    if not experts:
        return model
    return replace(
        model,
        experts=experts,
        experts_active=fields.number(Experts, "num_experts_per_tok"),
        experts_shared=fields.number(OptionalCount, "n_shared_experts", default=0),
        expert_ffn=fields.number(Width, "moe_intermediate_size"),
        dense_layers=fields.number(OptionalCount, "first_k_dense_replace", default=0),
    )


def require_moe_in_every_layer(fields: ConfigFields, key: str) -> None:
    """Raises ConfigError unless every layer after the leading dense ones has experts."""
    if (step := fields.number(Layers, key, default=1)) != 1:
        raise ConfigError(f"{fields.file}: {key} = {step} alternates dense and MoE layers", "expected 1")


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
    parallel_residual = fields.flag("use_parallel_residual", True)
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
}
"""`model_type` -> the function that reads the config."""
