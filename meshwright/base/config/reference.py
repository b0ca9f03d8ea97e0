"""Describes every config key with its type, default and meaning, from the docstrings of the config classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from meshwright.base.config.fingerprint import placement
from meshwright.base.config.model import OptionTable
from meshwright.base.config.run_config import RunConfig

TYPE_NAMES = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", OptionTable: "TABLE"}


@dataclass(frozen=True)
class KeyDescription:
    """One config key."""

    key: str
    """dotted key, as in a run file"""
    type: str
    """INT, FLOAT, BOOL, TEXT, TEXTS, TABLE, TABLES, or the legal values in braces"""
    default: str
    """default of the tiny preset, or "unset\""""
    help: str
    identity: bool
    """whether the key changes the numbers of a run"""


@dataclass(frozen=True)
class SectionDescription:
    """One section of a run file."""

    name: str
    """name of the section; empty for the keys at the top level"""
    help: str
    keys: list[KeyDescription]


def describe_config() -> list[SectionDescription]:
    """Describes the sections of a run file, those at the top level first."""
    config = RunConfig()
    placement_keys = placement(config)
    nested = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sections = {name: value for name, value in nested.items() if dataclasses.is_dataclass(value)}
    top_level = SectionDescription(
        "", inspect.getdoc(RunConfig) or "", list(describe_keys(config, "", set(sections), placement_keys))
    )
    return [top_level] + [
        SectionDescription(
            name, inspect.getdoc(type(value)) or "", list(describe_keys(value, f"{name}.", set(), placement_keys))
        )
        for name, value in sections.items()
    ]


def describe_keys(
    config: Any, prefix: str, skipped: set[str], placement_keys: Container[str]
) -> Iterator[KeyDescription]:
    """Describes the keys of one config class, except the fields in `skipped`."""
    hints, docs = get_type_hints(type(config), include_extras=True), field_docstrings(type(config))
    for field in dataclasses.fields(config):
        if field.name not in skipped:
            value = getattr(config, field.name)
            default = "unset" if value is None else json.dumps(value, default=dict)
            key = prefix + field.name.rstrip("_")
            yield KeyDescription(
                key, type_name(hints[field.name]), default, docs[field.name], key not in placement_keys
            )


def field_docstrings(cls: type) -> dict[str, str]:
    """Returns the docstring that follows each field in the source of a class and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for node, following in pairwise(definition.body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[node.target.id] = " ".join(str(following.value.value).split())
    return docs


def type_name(hint: Any) -> str:
    """Names the type of a key as the help shows it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, types.UnionType):
        return "|".join(type_name(part) for part in args if part is not type(None))
    if origin is Literal:
        return "{" + ",".join(args) + "}"
    if origin is tuple:
        return "TEXTS" if args[0] is str else "TABLES"
    return TYPE_NAMES[hint]
