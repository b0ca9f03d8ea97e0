"""Reads a config from TOML and command-line overrides, validates it, and writes it back as TOML.

Every error is one line with the key, the value that was found and the values that are expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from meshwright.base.config.constraints import Range
from meshwright.base.config.data import INIT_FROM, SOURCE_KINDS, TOKENIZER_FILE
from meshwright.base.config.model import OptionTable
from meshwright.base.config.parallelism import Degree
from meshwright.base.config.presets import PRESETS
from meshwright.base.config.run_config import RunConfig
from meshwright.base.io import file_inside, read_regular_file
from meshwright.errors import ConfigError

MAX_TOML_BYTES = 256 << 10
"""Size limit of a TOML file: a run file is a page of settings."""
MAX_KEY_COST = 1 << 20
"""Limit of the sum, over the lines of a TOML file, of the squared number of dots: the parser stores every prefix of
every dotted key, so its time and memory are quadratic in their length.
"""
NUMBER = re.compile(rb"(?<![\w.\-\"'])[+-]?\d+\.\d+(?:[eE][+-]?\d+)?(?![\w.\-\"'])")
"""A number with a dot, which cannot be a part of a dotted key of more than two parts."""
ALIASES = {"zero-0": "none", "zero-1": "optimizer", "zero-2": "gradients", "zero-3": "parameters"}
"""Other spellings of a value: ZeRO stages for `layout.shard`."""
ENTRY_POINTS = ("loss", "source", "collate", "metrics", "parallel_spec", "init")
"""Names of code of the user's own, beside `model`; they are typed on the command line or passed in Python."""
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class CommandLineValue(str):
    """A value from the command line: text that is converted to the type of its key."""


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    ranks: int | str | None = None,
    steps: int | str | None = None,
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree,
) -> RunConfig:
    """Loads and validates a config. Later sources take precedence over earlier ones, in the order of the arguments.

    Args:
        path: run file in TOML, or the folder of a run. Default: the ``tiny`` preset.
        overrides: single settings as ``"key=value"`` or ``"--key=value"``, such as ``"optimizer.lr=3e-4"``.
        ranks: total number of ranks; sets ``layout.replicate`` accordingly.
        steps: number of optimizer steps.
        complete: adds settings to the tree of those that were given; see models/initial_model.py.
    """
    if path is not None and path.is_dir():
        path = path / "run.toml"
    tree = read_toml(path) if path is not None else {}
    if path is not None and isinstance(folder := tree.get("init_from"), str) and folder:
        tree["init_from"] = os.path.join(path.parent, folder)
    kinds = [text.partition("=")[2] for text in overrides if text.removeprefix("--").startswith("data.kind=")]
    if kinds and isinstance(data := tree.get("data"), dict):
        tree["data"] = without_replaced_source(data, kinds[0])
    for override in overrides:
        key, separator, value = override.removeprefix("--").partition("=")
        if not separator:
            raise ConfigError(f"{override} has no value", f"expected {override}=VALUE")
        data = tree.get("data")
        if key == "data.kind" and isinstance(data, dict) and isinstance(data.get("kind"), CommandLineValue):
            tree["data"] = without_replaced_source(data, value)
        set_key(tree, key, CommandLineValue(value))
    if isinstance(folder := tree.get("init_from"), str) and folder:
        tree["init_from"] = os.path.abspath(folder)
    if steps is not None:
        set_key(tree, "steps", CommandLineValue(steps))
    config = with_named_tokenizer(config_from_dict(complete(tree)))
    if ranks is None:
        return config
    count = convert(Degree, CommandLineValue(ranks), "--ranks")
    return dataclasses.replace(config, layout=config.layout.with_ranks(count))


def without_replaced_source(data: dict[str, Any], kind: str) -> dict[str, Any]:
    """The section `data` without what another kind of source leaves unread: the first kind of the command line replaces
    the source of the file, and a later one that of the kind before it.
    """
    if data.get("kind", kind) == kind and not data.get("mixture"):
        return data
    return {key: value for key, value in data.items() if kind in SOURCE_KINDS.get(key, (kind,)) and key != "mixture"}


def with_named_tokenizer(config: RunConfig) -> RunConfig:
    """The config with the tokenizer.json of the folder of `init_from` for every source whose tokenizer is init_from."""
    data, folder = config.data, Path(config.init_from)
    sections = {"data": data} | {f"data.mixture[{index}]": source for index, source in enumerate(data.mixture)}
    named = [section for section, source in sections.items() if source.tokenizer == INIT_FROM]
    if not named:
        return config
    if not config.init_from:
        raise ConfigError(
            f"{named[0]}.tokenizer = init_from, and init_from is empty",
            f"try --init-from FOLDER, or another {named[0]}.tokenizer",
        )
    file_inside(folder.resolve(), TOKENIZER_FILE, "try --data.tokenizer=FILE")
    return dataclasses.replace(config, data=data.with_renamed_tokenizer(INIT_FROM, str(folder / TOKENIZER_FILE)))


def config_from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """Builds a validated config from a nested dict, on top of the preset that it names."""
    preset = tree.get("preset", "tiny")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"preset = {format_value(preset)} is unknown", f"expected one of {', '.join(PRESETS)}")
    config = build_dataclass(RunConfig, merge(PRESETS[preset], tree), "")
    assert isinstance(config, RunConfig)
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """Converts a config to a nested dict with the keys of a run file; the inverse of `config_from_dict`."""

    def to_plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name.rstrip("_"): to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, OptionTable):
            return dict(value)
        return [to_plain(item) for item in value] if isinstance(value, tuple) else value

    tree = to_plain(config)
    assert isinstance(tree, dict)
    return tree


def config_to_toml(config: RunConfig) -> str:
    """Writes a config as a run file; settings without a value are left out."""
    return tomli_w.dumps(without_none(config_to_dict(config)))


def without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drops keys whose value is None, since TOML has no null, and tables without a value."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return without_none(value) if isinstance(value, Mapping) else value

    return {key: value for key, item in tree.items() if (value := plain(item)) is not None and value != {}}


def read_toml(path: Path, description: str = "run file") -> dict[str, Any]:
    """Reads an untrusted TOML file; `description` says in errors what kind of file it is."""
    name = f"{description} {path}"
    content = read_regular_file(path, MAX_TOML_BYTES, name, "a TOML file of settings")
    if key_cost(content) > MAX_KEY_COST:
        raise ConfigError(f"{name} has too many long dotted keys", "expected a TOML file of settings")
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{name} has too many levels of nesting", "expected a TOML file of settings") from None
    except ValueError as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"{name} is not TOML: {error}", "expected a TOML file of settings") from None


def key_cost(content: bytes) -> int:
    """The sum over all lines of the squared number of dots that may belong to dotted keys; see MAX_KEY_COST."""
    return sum(NUMBER.sub(b"", line).count(b".") ** 2 for line in content.splitlines())


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in a nested dict."""
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"{shorten(key)} = {format_value(value)} is below {shorten(parent)}, which is a value and not a table",
                "expected a key of the config",
            )
        tree = child
    tree[last] = value


def merge(base: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested dicts; values of `updates` take precedence."""
    merged = dict(base)
    for key, value in updates.items():
        current = merged.get(key)
        merged[key] = merge(current, value) if isinstance(current, Mapping) and isinstance(value, Mapping) else value
    return merged


@cache
def key_types(cls: type) -> dict[str, Any]:
    """Returns the annotated type of every TOML key of a config class."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name.rstrip("_"): hints[f.name] for f in dataclasses.fields(cls)}


def build_dataclass(cls: type, tree: Any, path: str) -> Any:
    """Builds a config class from a nested dict; `path` is its dotted key, for errors."""
    if path in ("model", "optimizer", "schedule") and isinstance(tree, str):
        raise entry_point_error(path, tree)
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{path} = {format_value(tree)} is a value", f"expected a table with {', '.join(key_types(cls))}"
        )
    fields = {f.name.rstrip("_"): f.name for f in dataclasses.fields(cls)}
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields and where in ENTRY_POINTS:
            raise entry_point_error(where, value)
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            suggestion = f"did you mean {path + '.' if path else ''}{close[0]}? " if close else ""
            raise ConfigError(
                f"unknown key {shorten(where)} = {format_value(value)}",
                f"{suggestion}expected one of {', '.join(fields)}",
            )
        values[fields[key]] = convert(key_types(cls)[key], value, where)
    try:
        return cls(**values)
    except ConfigError as error:  # a source of a mixture does not know its index
        if path.startswith("data.mixture"):
            raise ConfigError(error.message.replace("data.", f"{path}."), error.hint) from None
        raise


def entry_point_error(key: str, value: Any) -> ConfigError:
    """Refuses to read from a config which code to import."""
    return ConfigError(
        f"{key} = {format_value(value)}: code of your own is never imported from a run file",
        f"try --{key.replace('_', '-')} MODULE:NAME on the command line",
    )


def convert(kind: Any, value: Any, where: str) -> Any:
    """Converts a value to the declared type of the key `where`, or raises ConfigError."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        result = convert(args[0], value, where)
        for limit in args[1:]:
            if isinstance(limit, Range) and result is not None and not limit.contains(result):
                raise ConfigError(f"{where} = {format_value(value)} is out of range", f"expected {limit}")
        return result
    if origin in (Union, types.UnionType):  # `X | None` and `bool | X` occur
        is_bool_text = isinstance(value, CommandLineValue) and value.lower() in ("true", "false")
        if bool in args and (isinstance(value, bool) or is_bool_text):
            return convert_scalar(bool, value, where)
        if bool in args and type(None) not in args:
            try:
                return convert(next(a for a in args if a is not bool), value, where)
            except ConfigError as error:
                raise ConfigError(
                    error.message, error.hint.replace("expected", "expected true, false, or", 1)
                ) from None
        args = tuple(a for a in args if a is not bool)
        if value is None or (isinstance(value, CommandLineValue) and value in ("none", "")):
            return None
        return convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        value = ALIASES.get(value, value) if isinstance(value, str) and ALIASES.get(value) in args else value
        if value not in args:
            raise ConfigError(
                f"{where} = {format_value(value)} is unknown", f"expected one of {', '.join(map(str, args))}"
            )
        return str(value)
    if origin is tuple:
        items = parse_toml_value(value) if isinstance(value, CommandLineValue) else value
        if args[0] is str and isinstance(value, CommandLineValue) and not isinstance(items, list):
            items = value.split(",")
        if not isinstance(items, (list, tuple)):
            expected = "texts" if args[0] is str else "tables"
            raise ConfigError(f"{where} = {format_value(value)} is not a list", f"expected a list of {expected}")
        return tuple(convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if kind is OptionTable:
        return option_table(value, where)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return build_dataclass(kind, value, where)
    return convert_scalar(kind, value, where)


def option_table(value: Any, where: str) -> OptionTable:
    """Reads a table of scalars; the model family validates its keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {format_value(value)} is a value", "expected a table of settings")
    parsed = {k: parse_toml_value(str(v)) if isinstance(v, CommandLineValue) else v for k, v in value.items()}
    for key, item in parsed.items():
        if not isinstance(item, (bool, int, float, str)):
            raise ConfigError(
                f"{where}.{shorten(key)} = {format_value(item)} is not a scalar", "expected a number or text"
            )
    return OptionTable(parsed)


def convert_scalar(kind: type, value: Any, where: str) -> Any:
    """Converts a value to int, float, bool or str. Only text from the command line changes its type."""
    wrong_type = ConfigError(f"{where} = {format_value(value)} has the wrong type", f"expected {TYPE_NAMES[kind]}")
    if isinstance(value, CommandLineValue):
        try:
            if kind is bool:
                return {"true": True, "false": False}[value.lower()]
            if kind is int:
                return int(value.replace("_", ""))
            result = kind(value)
        except (ValueError, KeyError):
            raise wrong_type from None
    elif kind is float and type(value) is int and abs(value) < 1 << 1000:
        result = float(value)
    elif type(value) is kind:
        result = value
    else:
        raise wrong_type
    if isinstance(result, float) and not abs(result) < float("inf"):
        raise ConfigError(f"{where} = {format_value(value)} is not finite", "expected a finite number")
    return result


def parse_toml_value(text: str) -> Any:
    """Parses text as one TOML value; text that is not TOML is returned as it is."""
    if key_cost(text.encode(errors="replace")) > MAX_KEY_COST:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # TOMLDecodeError is a ValueError
        return text


def format_value(value: Any) -> str:
    """Formats a value as the user wrote it, in at most 60 characters."""
    try:
        text = str(value) if isinstance(value, CommandLineValue) else json.dumps(value, default=str)
    except (ValueError, RecursionError):  # a number of thousands of digits, a table of thousands of levels
        text = f"a {type(value).__name__} too large to show"
    return shorten(text)


def shorten(text: str, limit: int = 60) -> str:
    """Shortens text from an untrusted file for a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
