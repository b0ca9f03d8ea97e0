"""Separates the settings that change a run's numbers (identity) from those that do not (placement), and hashes them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from meshwright.base.config.constraints import Placement
from meshwright.base.config.model import OptionTable
from meshwright.base.config.run_config import RunConfig


def identity(config: RunConfig) -> dict[str, Any]:
    """Returns every setting that changes the numbers of a run, by dotted key."""
    return {key: value for key, value, is_placement in flatten(config) if not is_placement}


def placement(config: RunConfig) -> dict[str, Any]:
    """Returns every setting that does not change the numbers of a run, by dotted key."""
    return {key: value for key, value, is_placement in flatten(config) if is_placement}


def flatten(node: Any, path: str = "") -> list[tuple[str, Any, bool]]:
    """Lists (dotted key, value, whether it is placement) for every leaf of a config."""
    cls: type = type(node)
    hints = type_hints(cls)
    rows: list[tuple[str, Any, bool]] = []
    for field in dataclasses.fields(node):
        value, hint, key = getattr(node, field.name), hints[field.name], path + field.name.rstrip("_")
        marked = get_origin(hint) is Annotated and any(isinstance(m, Placement) for m in get_args(hint)[1:])
        if dataclasses.is_dataclass(value):
            rows.extend((k, v, p or marked) for k, v, p in flatten(value, key + "."))
        elif isinstance(value, OptionTable):
            rows.extend((f"{key}.{name}", option, marked) for name, option in value.items())
        elif isinstance(value, tuple) and value and isinstance(value[0], str):
            rows.append((key, list(value), marked))
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                rows.extend((k, v, p or marked) for k, v, p in flatten(item, f"{key}[{i}]."))
        else:
            rows.append((key, value, marked))
    return rows


@cache
def type_hints(cls: type) -> dict[str, Any]:
    """The annotated types of a config class, which are slow to evaluate."""
    return get_type_hints(cls, include_extras=True)


def fingerprint(values: dict[str, Any]) -> str:
    """Hashes settings: the first sixteen hex digits of the SHA-256 of their canonical JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
