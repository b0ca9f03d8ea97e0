"""The settings of a model whose initial weights come from a folder: those of the folder's config.json. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.config import ModelConfig, RunConfig, load_config
from meshwright.base.config.data import BYTES, INIT_FROM, TOKENIZER_FILE
from meshwright.base.config.reader import build_dataclass, config_to_dict, format_value, with_named_tokenizer
from meshwright.base.models.config_fields import ConfigFields, read_config_file
from meshwright.base.models.registry import read_huggingface_section
from meshwright.errors import ConfigError


def load_run_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    ranks: int | str | None = None,
    steps: int | str | None = None,
    *,
    own_model: bool = False,
) -> RunConfig:
    """Loads a config as `load_config` does; with `init_from`, the keys of `model` are those of that folder, and its
    tokenizer is the default one. A custom model (`own_model`) has no such keys.
    """
    complete = (lambda tree: tree) if own_model else with_initial_model
    return with_initial_tokenizer(load_config(path, overrides, ranks, steps, complete))


def with_initial_model(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of given settings with the `model` of `init_from`. Raises ConfigError if a given key contradicts it."""
    file = config_file(tree.get("init_from"))
    custom, given = tree.get("custom_model"), tree.get("model", {})
    if file is None or not isinstance(given, Mapping) or (isinstance(custom, Mapping) and custom.get("class")):
        return tree
    return tree | {"model": merge_model(given, file)}


def take_initial_model(config: RunConfig) -> RunConfig:
    """The same for a config that is built: a key with its default value counts as not given."""
    file = config_file(config.init_from)
    if file is None:
        return config
    values, defaults = config_to_dict(config.model), config_to_dict(ModelConfig())
    given = {key: value for key, value in values.items() if value != defaults[key]}
    model = build_dataclass(ModelConfig, merge_model(given, file), "model")
    assert isinstance(model, ModelConfig)
    return replace(config, model=model)


def with_initial_tokenizer(config: RunConfig) -> RunConfig:
    """The config with the tokenizer of the folder of `init_from`, if it has one and its text names none."""
    if config.init_from and config.data.lacks_tokenizer and os.path.lexists(Path(config.init_from) / TOKENIZER_FILE):
        config = replace(config, data=replace(config.data, tokenizer=INIT_FROM))
    return with_named_tokenizer(config)


def require_tokenized(config: RunConfig) -> None:
    """Raises a ConfigError if the default data, which is bytes, would train weights that come with a tokenizer."""
    data, file = config.data, Path(config.init_from) / TOKENIZER_FILE
    if config.rl.enabled or not config.init_from or not os.path.lexists(file):
        return
    trained = f"trains on bytes, and init_from = {config.init_from} has a tokenizer"
    for index, source in enumerate(data.mixture):
        section = f"data.mixture[{index}]"
        if source.kind == "stdlib" and (source.tokenizer or data.tokenizer) != BYTES:
            raise ConfigError(
                f"{section}.kind = stdlib {trained}",
                f"try another source, or {section}.tokenizer = {BYTES} to train on bytes",
            )
    if not data.mixture and data.kind == "stdlib" and data.tokenizer != BYTES:
        raise ConfigError(
            f"data.kind = stdlib {trained}",
            "try --data.kind=text --data.path=FILE, or --data.tokenizer=bytes to train on bytes",
        )


def config_file(folder: Any) -> Path | None:
    """The config.json of a folder of weights, if it has one."""
    file = Path(str(folder)) / "config.json" if isinstance(folder, str) and folder else None
    return file if file is not None and file.exists() else None


def merge_model(given: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The section `model` of a config.json, with the given keys that it does not determine."""
    section = read_huggingface_section(ConfigFields.of(read_config_file(file), str(file)))
    own = {key: value for key, value in given.items() if key != "options"}
    options = given.get("options", {})
    # the type of a key may depend on others, so given keys are read with those of the file beside them
    read = config_to_dict(build_dataclass(ModelConfig, section | own, "model"))
    for key in own.keys() & section.keys():
        if read[key] != section[key]:
            raise contradiction(f"model.{key}", read[key], section[key], file)
    stored = section.get("options", {})
    for key, value in options.items() if isinstance(options, Mapping) else ():
        if key in stored and str(value) != str(stored[key]) and value != stored[key]:
            raise contradiction(f"model.options.{key}", value, stored[key], file)
    return config_to_dict(ModelConfig()) | section | own | {"options": {**options, **stored}}


def contradiction(key: str, given: Any, stored: Any, file: Path) -> ConfigError:
    return ConfigError(
        f"{key} = {format_value(given)}, and {file} has {format_value(stored)}",
        f"try to remove {key}: the weights decide it",
    )
