"""Writes nested dicts and lists as YAML that people can read. Torch-free.

Every string that YAML could take for something else is quoted as JSON does, which YAML reads in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*")
"""Strings that need no quotes, unless they are words with a meaning."""
WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def yaml_documents(documents: Sequence[dict[str, Any]]) -> str:
    """Several documents as the text of one file."""
    return "---\n".join(yaml_text(document) for document in documents)


def yaml_text(value: dict[str, Any]) -> str:
    return "".join(f"{line}\n" for line in lines_of(value))


def lines_of(value: Any) -> list[str]:
    """The lines of a dict or a list that is not empty, without indentation."""
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            nested = nested_lines(item)
            lines += [f"{scalar(str(key))}: {inline(item)}"] if nested is None else [f"{scalar(str(key))}:{nested[0]}"]
            lines += [f"  {line}" for line in nested[1:]] if nested is not None else []
        return lines
    lines = []
    for item in value:
        if isinstance(item, dict) and item:
            first, *rest = lines_of(item)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines.append(f"- {inline(item)}")
    return lines


def nested_lines(item: Any) -> list[str] | None:
    """What follows the colon of a key, then the lines below it; None if the value fits on the line of its key."""
    if isinstance(item, dict) and item:
        return ["", *lines_of(item)]
    if isinstance(item, list | tuple) and any(isinstance(entry, dict) for entry in item):
        return ["", *lines_of(item)]
    if isinstance(item, str) and is_block(item):
        return [" |", *item.splitlines()]
    return None


def is_block(text: str) -> bool:
    """Whether a text of several lines can be a literal block, which keeps every character of it."""
    lines = text.splitlines()
    plain = all(line.isprintable() and line == line.rstrip() for line in lines)
    return text.endswith("\n") and len(lines) > 1 and plain and all(lines[i] for i in (0, -1)) and lines[0][0] != " "


def inline(value: Any) -> str:
    """A value on one line; lists and empty dicts in the notation of JSON."""
    if isinstance(value, str):
        return scalar(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    return json.dumps(value)


def scalar(text: str) -> str:
    return text if PLAIN.fullmatch(text) and text.lower() not in WORDS else json.dumps(text)
