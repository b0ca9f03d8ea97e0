"""How a verb declares its words, and how it answers in a line or in JSON."""

from __future__ import annotations

import json
from math import isfinite
from typing import Annotated, Any

from tyro.conf import arg


def word(metavar: str, meaning: str, *aliases: str) -> Any:
    """A word of a verb; what it is when not given is part of its meaning."""
    return arg(metavar=metavar, help=meaning, help_behavior_hint="", aliases=aliases or None)


def flag(meaning: str) -> Any:
    return arg(help=meaning, help_behavior_hint="")


Json = Annotated[bool, flag("for machines: JSON on standard output")]


def tell(as_json: bool, answer: dict[str, Any], text: str) -> None:
    """Text may quote a stranger's file: what is no printable character is not sent to the terminal."""
    print(json.dumps(finite(answer), allow_nan=False) if as_json else printable(text))


def finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite is null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
