"""An answer in five parts, read from a text or typed part by part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.base.io import read_regular_file
from meshwright.errors import ConfigError
from meshwright_practice.interview.drills.scenarios import PARTS

MAX_BYTES = 1 << 16
HEADING = re.compile(rf"^\W*({'|'.join(PARTS)})\b\W*?(?::|$|\n)", re.IGNORECASE | re.MULTILINE)
EXPECTED = f"a text with the headings {', '.join(part.capitalize() for part in PARTS)}"


def read_answer(path: Path) -> dict[str, str]:
    content = read_regular_file(path, MAX_BYTES, str(path), EXPECTED)
    return parse_answer(content.decode(errors="replace"), str(path))


def parse_answer(text: str, name: str = "the answer") -> dict[str, str]:
    """part -> its text; a part without a heading is empty. Raises ConfigError if there is no heading at all."""
    matches = list(HEADING.finditer(text))
    if not matches:
        raise ConfigError(f"{name} has none of the five parts", f"expected {EXPECTED}")
    parts = dict.fromkeys(PARTS, "")
    for match, following in zip(matches, [*matches[1:], None], strict=True):
        body = text[match.end() : following.start() if following else len(text)].strip()
        part = match[1].lower()
        parts[part] = f"{parts[part]}\n{body}".strip()
    return parts


def ask_answer(ask: Callable[[str], str]) -> Mapping[str, str]:
    return {part: ask(f"{part.capitalize()}:") for part in PARTS}
