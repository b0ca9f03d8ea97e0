"""Reads the `config.json` of a Hugging Face folder, which is untrusted, key by key. Torch-free.

The file is JSON of bounded size, and every number in it has a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from meshwright.base.config.constraints import PositiveFloat, Range
from meshwright.base.config.reader import convert, format_value, shorten
from meshwright.base.io import parse_json, read_regular_file
from meshwright.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
"""Size limit of a config.json."""

Layers = Annotated[int, Range(minimum=1, maximum=1 << 12)]
Heads = Annotated[int, Range(minimum=1, maximum=1 << 14)]
Width = Annotated[int, Range(minimum=1, maximum=1 << 20)]
OptionalWidth = Annotated[int, Range(minimum=0, maximum=1 << 20)]
Vocabulary = Annotated[int, Range(minimum=2, maximum=1 << 24)]
Experts = Annotated[int, Range(minimum=1, maximum=1 << 14)]
OptionalCount = Annotated[int, Range(minimum=0, maximum=1 << 14)]
Tokens = Annotated[int, Range(minimum=1, maximum=1 << 31)]

REQUIRED = object()
"""Marks a key without a default: the file must have it."""

INERT_KEYS = frozenset(
    {
        *("_attn_implementation", "_name_or_path", "architectures", "auto_map", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "tokenizer_class"),
        *("dtype", "torch_dtype", "initializer_range", "max_position_embeddings", "pretraining_tp", "use_cache"),
        *("attention_dropout", "hidden_dropout", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("id2label", "label2id", "problem_type", "is_encoder_decoder", "finetuning_task", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "output_router_logits"),
    }
)
"""Keys that do not change what the weights compute: text generation, training and bookkeeping. Models train without
dropout, whatever rate the file has.
"""


def read_config_file(file: Path) -> Any:
    """Reads the untrusted JSON file."""
    expected = "a model's config.json"
    return parse_json(read_regular_file(file, MAX_CONFIG_BYTES, str(file), expected), str(file), expected)


@dataclass(frozen=True)
class ConfigFields:
    """The keys of one config.json; each is read with the type and range that it must have."""

    tree: Mapping[str, Any]
    """the JSON object"""
    file: str
    """name of the file in error messages"""
    read: set[str] = field(default_factory=set, compare=False)
    """the keys that were read"""

    @classmethod
    def of(cls, tree: Any, file: str) -> ConfigFields:
        """The fields of the content of an untrusted file."""
        if not isinstance(tree, Mapping):
            raise ConfigError(
                f"{file} contains {format_value(tree)}", "expected a JSON object with model_type and sizes"
            )
        return cls(tree, file)

    def get(self, kind: Any, default: Any, *keys: str) -> Any:
        """Returns the value of the first key that is present and not null, else the default."""
        self.read.update(keys)
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
        self.read.update(keys)
        for key in keys:
            value = self.tree.get(key)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{self.file}: {key} = {format_value(value)} is a value", "expected an object or null"
                )
            if value:
                return value
        return {}

    def rope_theta(self, default: float = 10_000.0) -> float:
        """Newer files have it in the object `rope_parameters`."""
        value: float | None = self.get(PositiveFloat, None, "rope_theta", "rotary_emb_base")
        nested = ConfigFields(self.table("rope_parameters"), f"{self.file}: rope_parameters")
        return value if value is not None else float(nested.get(PositiveFloat, default, "rope_theta"))

    def norm_eps(self) -> float:
        return float(self.get(PositiveFloat, 1e-5, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))

    def activation(self) -> str:
        return self.text("hidden_act" if "hidden_act" in self.tree else "activation_function", "silu")

    def require(self, key: str, expected: bool | int | float | str, default: bool | int | float | str) -> None:
        """Raises ConfigError unless a key has the one value that the family computes; `default` is what a file without
        the key means.
        """
        self.read.add(key)
        value = default if (found := self.tree.get(key)) is None else found
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            shown = "is not set" if found is None else f"= {format_value(found)} is not supported"
            raise ConfigError(f"{self.file}: {key} {shown}", f"expected {format_value(expected)}")

    def require_plain_rope(self) -> None:
        """Raises ConfigError if the rotary frequencies are scaled, or rotate a part of a head alone."""
        for key in ("rope_scaling", "rope_parameters"):
            scaling = self.table(key)
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind != "default" or scaling.get("partial_rotary_factor", 1.0) != 1.0:
                raise ConfigError(
                    f"{self.file}: {key} = {format_value(scaling)} is not supported", "expected rope_type = default"
                )
        self.require("partial_rotary_factor", 1.0, 1.0)

    def require_all_read(self) -> None:
        """Raises ConfigError if the file has a key that nothing read and that may change what the model computes."""
        unread = [key for key, value in self.tree.items() if value is not None and key not in self.read | INERT_KEYS]
        if unread:
            raise ConfigError(
                f"{self.file}: {shorten(unread[0])} = {format_value(self.tree[unread[0]])} is unknown for this family",
                "try to remove the key, if the model computes the same without it",
            )
