"""Retired identifiers and phrases do not come back in code, messages, docs or tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".md", ".toml", ".html", ".svg", ".yml", ".yaml")
FOLDERS = ("meshwright", "practice", "tests", "benchmarks", "fuzz", "examples", "docs", ".github")
TERMS = tomllib.loads(Path(__file__).with_name("retired_terms.toml").read_text())
IDENTIFIERS, PHRASES = TERMS["identifiers"], TERMS["phrases"]
EXEMPT = ("retired_terms.toml", "CHANGELOG.md")
"""The table itself, and the page that lists what was renamed."""


def documents() -> list[Path]:
    """Every text file of the repository that a person reads."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    found = [path for path in (*ROOT.iterdir(), *inside) if path.suffix in SUFFIXES or path.name == "Makefile"]
    return [path for path in found if path.is_file() and path.name not in EXEMPT]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in documents()}


def matches(pattern: re.Pattern[str], texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for name, text in texts.items()
        for match in pattern.finditer(text)
    ]


def test_retired_identifiers_do_not_appear(texts):
    pattern = re.compile(rf"(?<![A-Za-z0-9_])({'|'.join(map(re.escape, IDENTIFIERS))})(?![A-Za-z0-9_])")
    assert not matches(pattern, texts)


def test_retired_phrases_do_not_appear(texts):
    phrases = "|".join(re.escape(phrase).replace(r"\ ", r"\s+") for phrase in PHRASES)
    assert not matches(re.compile(rf"(?<![a-z])({phrases})(?![a-z])", re.IGNORECASE), texts)


def test_each_retired_term_names_its_replacement():
    assert len(IDENTIFIERS) > 50
    assert len(PHRASES) > 30
    assert all({**IDENTIFIERS, **PHRASES}.values())
