"""The settings in which several runs differ. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MAX_DIFFERENCES = 200
MAX_VALUE = 200
"""Characters of a value that are shown."""


def config_differences(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The keys whose values are not the same in all configs, in the order of the first config that has them."""
    flat = [flatten(config) for config in configs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    differing = [key for key in keys if len({values.get(key) for values in flat}) > 1]
    return [{"key": key, "values": [values.get(key) for values in flat]} for key in differing[:MAX_DIFFERENCES]]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The settings of a config by their full keys, such as `optimizer.lr`, as short text."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, default=str)[:MAX_VALUE]
    return flat
