"""Prints the result of a verb as text for people or as JSON for machines."""

from __future__ import annotations

import json
from typing import Any

from meshwright.base.io import finite, printable


def emit(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Prints `value` as one line of JSON if `as_json`, else `text`."""
    if as_json:
        emit_json(value)
    else:
        emit_text(text)


def emit_json(value: dict[str, Any]) -> None:
    """Prints one line of JSON; infinity and NaN become null."""
    print(json.dumps(finite(value), allow_nan=False))


def emit_text(text: str) -> None:
    """Prints text that may quote an untrusted file, without its control characters."""
    print(printable(text))
