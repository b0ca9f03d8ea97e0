"""Writes docs/handbook/coverage.md: every numbered item of the handbook, with what makes it real."""

from __future__ import annotations

import argparse
import pkgutil
import re
import tomllib
import unicodedata
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
HANDBOOK = DOCS / "handbook"
ITEMS = 156
INTRODUCTION = """\
---
hide: [navigation, toc]
---

# Coverage

The handbook makes {count} numbered claims, and each is made real by something that runs or can be read: a chapter
that states it, a card or a lab in which you try it, a command that shows it on your own run, a test that keeps it. The
page is written by `python docs/write_coverage.py` from `docs/handbook/items.toml` and from the items that cards and
labs name themselves; a test checks that no item is missing and that every reference exists.

"""


@dataclass(frozen=True)
class Item:
    """One numbered item and its references."""

    number: int
    title: str
    chapters: tuple[str, ...]
    """pages of the handbook with an anchor, such as map.md#one-step-precisely"""
    commands: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    labs: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()


def read_items() -> list[Item]:
    """The items of items.toml, with the cards and labs that name them."""
    cards, labs = by_item(all_cards()), by_item(all_labs())
    rows = tomllib.loads((HANDBOOK / "items.toml").read_text())["item"]
    return [
        Item(
            number=(number := row["number"]),
            title=row["title"],
            chapters=tuple(row["chapters"]),
            commands=tuple(row.get("commands", ())),
            tests=tuple(row.get("tests", ())),
            labs=tuple(dict.fromkeys([*row.get("labs", ()), *labs.get(number, ())])),
            cards=tuple(cards.get(number, ())),
        )
        for row in rows
    ]


def all_cards() -> list[Any]:
    """The cards of all modules of the deck; reading them does not import torch."""
    return [card for module in submodules("meshwright_practice.cards.deck") for card in getattr(module, "CARDS", ())]


def all_labs() -> list[Any]:
    """The labs, which are packages with the value LAB."""
    return [module.LAB for module in submodules("meshwright_practice.labs", packages=True) if hasattr(module, "LAB")]


def submodules(package: str, packages: bool = False) -> list[Any]:
    """The modules, or the packages, directly inside a package; none where there is no such package."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    found = sorted(pkgutil.iter_modules(spec.submodule_search_locations), key=lambda module: module.name)
    return [import_module(f"{package}.{module.name}") for module in found if module.ispkg == packages]


def by_item(entries: list[Any]) -> dict[int, list[str]]:
    """Number of an item -> the ids of the cards or labs that name it."""
    numbers: dict[int, list[str]] = {}
    for entry in entries:
        for number in entry.items:
            numbers.setdefault(number, []).append(entry.id)
    return numbers


def headings(page: str) -> dict[str, str]:
    """The anchors of a chapter -> its headings, as mkdocs makes them."""
    lines = re.sub(r"```.*?```", "", (HANDBOOK / page).read_text(), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    return {anchor(title): title.replace("`", "") for title in titles}


def anchor(title: str) -> str:
    """The anchor of a heading: the slug of Python-Markdown."""
    text = unicodedata.normalize("NFKD", title.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def coverage() -> str:
    """Returns the text of docs/handbook/coverage.md."""
    items = read_items()
    names = {page.name: headings(page.name) for page in HANDBOOK.glob("*.md") if page.name != "coverage.md"}
    rows = [item_row(item, names) for item in items]
    table = ["| no. | item | chapters | cards and labs | commands | tests |", "|---|---|---|---|---|---|", *rows]
    return INTRODUCTION.format(count=len(items)) + "\n".join(table) + "\n"


def item_row(item: Item, names: dict[str, dict[str, str]]) -> str:
    chapters = "<br>".join(chapter_link(chapter, names) for chapter in item.chapters)
    practice = "<br>".join(f"`{name}`" for name in (*item.cards, *(f"lab {lab}" for lab in item.labs)))
    commands = "<br>".join(f"[`{name}`](../commands.md#meshwright-{name.replace(' ', '-')})" for name in item.commands)
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in item.tests)
    return f"| {item.number} | {item.title} | {chapters} | {practice} | {commands} | {tests} |"


def chapter_link(chapter: str, names: dict[str, dict[str, str]]) -> str:
    page, _, heading = chapter.partition("#")
    title = names[page].get(heading, heading) if heading else next(iter(names[page].values()))
    return f"[{title}]({chapter})"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (HANDBOOK / "coverage.md").write_text(coverage())
