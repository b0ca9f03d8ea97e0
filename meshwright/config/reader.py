"""TOML and command-line words in, a checked RunConfig out; every refusal is one line with the key, the value and what
is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from meshwright.config.constraints import PositiveInt, Range
from meshwright.config.presets import PRESETS
from meshwright.config.run_config import RunConfig
from meshwright.errors import ConfigError
from meshwright.io import read_regular_file

MAX_TOML_BYTES = 1 << 20  # a run file is a page of settings; more than this is a mistake or an attack
MOST_DOTS = 4096


SPELLINGS = {"zero-0": "none", "zero-1": "optimizer", "zero-2": "gradients", "zero-3": "parameters"}
"""Other names of the same things."""


class CommandLineValue(str):
    """A value from the command line: text that takes the type of its key."""


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    ranks: int | str | None = None,
    steps: int | str | None = None,
) -> RunConfig:
    """Defaults, then the preset, then the file, then `--a.b=c` words, then the two settings that have words of their
    own.
    """
    tree = read_toml(path) if path is not None else {}
    for word in overrides:
        key, separator, value = word.removeprefix("--").partition("=")
        if not separator:
            raise ConfigError(f"{word!r} has no value", f"allowed: --{key}=VALUE")
        set_key(tree, key, CommandLineValue(value))
    if steps is not None:
        set_key(tree, "steps", CommandLineValue(steps))
    config = config_from_dict(tree)
    if ranks is None:
        return config
    count = convert(PositiveInt, CommandLineValue(ranks), "--ranks")
    return dataclasses.replace(config, layout=config.layout.with_ranks(count))


def config_from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """A checked config from a nested dict of plain values."""
    preset = tree.get("preset", "tiny")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"preset = {format_value(preset)} is not known", f"allowed: {', '.join(PRESETS)}")
    config = build_dataclass(RunConfig, merge(PRESETS[preset], tree), "")
    assert isinstance(config, RunConfig)
    return config


def read_toml(path: Path, what: str = "run file") -> dict[str, Any]:
    text = read_regular_file(path, MAX_TOML_BYTES, f"{what} {path}", "a TOML file of settings")
    if any(line.count(b".") > MOST_DOTS for line in text.splitlines()):  # parsing takes the square of them
        raise ConfigError(f"{what} {path} has a line with over {MOST_DOTS:,} dots", "allowed: a TOML file of settings")
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"{what} {path} is not TOML: {error}", "allowed: a TOML file") from None


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in a nested dict."""
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"{key} = {format_value(value)} goes below {parent}, which is a value", "allowed: a key of the tree"
            )
        tree = child
    tree[last] = value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


@cache
def keys_of(cls: type) -> dict[str, Any]:
    """TOML key -> annotated type, for a dataclass of the tree."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name.rstrip("_"): hints[f.name] for f in dataclasses.fields(cls)}


def build_dataclass(cls: type, tree: Any, path: str) -> Any:
    """A dataclass of the tree from a nested dict; the path names where we are in every refusal."""
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{path} = {format_value(tree)} is a value", f"allowed: a table with {', '.join(keys_of(cls))}"
        )
    attributes = {f.name.rstrip("_"): f.name for f in dataclasses.fields(cls)}
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        if key not in attributes:
            close = difflib.get_close_matches(str(key), attributes, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(f"unknown key {where} = {format_value(value)}", f"{hint}allowed: {', '.join(attributes)}")
        values[attributes[key]] = convert(keys_of(cls)[key], value, where)
    try:
        return cls(**values)
    except ConfigError as error:  # a source inside a mixture says where it stands
        if path.startswith("data.mixture"):
            raise ConfigError(error.message.replace("data.", f"{path}."), error.hint) from None
        raise


def convert(kind: Any, value: Any, where: str) -> Any:
    """The value as its declared type, or a refusal."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        result = convert(args[0], value, where)
        for limit in args[1:]:
            if isinstance(limit, Range) and result is not None and not limit.contains(result):
                raise ConfigError(f"{where} = {format_value(value)} is out of range", f"allowed: {limit}")
        return result
    if origin in (Union, types.UnionType):  # `X | None` and `bool | X` are used
        if bool in args and (
            isinstance(value, bool) or (isinstance(value, CommandLineValue) and value.lower() in ("true", "false"))
        ):
            return scalar(bool, value, where)
        args = tuple(a for a in args if a is not bool)
        if value is None or (isinstance(value, CommandLineValue) and value in ("none", "")):
            return None
        return convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        value = SPELLINGS.get(value, value) if isinstance(value, str) and SPELLINGS.get(value) in args else value
        if value not in args:
            raise ConfigError(f"{where} = {format_value(value)} is not known", f"allowed: {', '.join(map(str, args))}")
        return str(value)
    if origin is tuple:
        items = toml_value(value) if isinstance(value, CommandLineValue) else value
        if not isinstance(items, (list, tuple)):
            raise ConfigError(f"{where} = {format_value(value)} is not a list", "allowed: a list of tables")
        return tuple(convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return build_dataclass(kind, value, where)
    return scalar(kind, value, where)


def scalar(kind: type, value: Any, where: str) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if isinstance(value, CommandLineValue):
        try:
            if kind is bool:
                return {"true": True, "false": False}[value.lower()]
            if kind is int:
                return int(value.replace("_", ""))
            number = kind(value)
        except (ValueError, KeyError):
            raise ConfigError(
                f"{where} = {format_value(value)} has the wrong type", f"allowed: {names[kind]}"
            ) from None
    elif kind is float and type(value) is int and abs(value) < 1 << 1000:
        number = float(value)
    elif type(value) is kind:
        number = value
    else:
        raise ConfigError(f"{where} = {format_value(value)} has the wrong type", f"allowed: {names[kind]}")
    if isinstance(number, float) and not abs(number) < float("inf"):
        raise ConfigError(f"{where} = {format_value(value)} is not finite", "allowed: a finite number")
    return number


def toml_value(word: str) -> Any:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def format_value(value: Any) -> str:
    """A value as the user wrote it, short enough for one line."""
    try:
        text = str(value) if isinstance(value, CommandLineValue) else json.dumps(value, default=str)
    except (ValueError, RecursionError):  # a number of thousands of digits, a table of thousands of levels
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def config_to_dict(config: Any) -> dict[str, Any]:
    """The whole tree as nested dicts of plain values, under its TOML keys; `from_dict` is its inverse."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name.rstrip("_"): plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    tree = plain(config)
    assert isinstance(tree, dict)
    return tree


def config_to_toml(config: RunConfig) -> str:
    """The resolved config as a run file; unset values are left out."""
    lines: list[str] = []

    def table(tree: Mapping[str, Any], path: str) -> None:
        rows = [(k, v) for k, v in tree.items() if not isinstance(v, (Mapping, list)) and v is not None]
        if path:
            lines.extend(["", f"[{path}]"])
        lines.extend(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in rows)
        for key, value in tree.items():
            below = f"{path}.{key}" if path else key
            if isinstance(value, Mapping):
                table(value, below)
            for item in value if isinstance(value, list) else ():
                lines.extend(["", f"[[{below}]]"])
                lines.extend(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in item.items())

    table(config_to_dict(config), "")
    return "\n".join(lines) + "\n"
