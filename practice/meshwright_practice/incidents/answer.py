"""The answer to an incident: class, rank, step, fix and evidence, given as words or asked for. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwright.errors import ConfigError
from meshwright_practice.incidents.catalogue import CLASSES, FIXES

T = TypeVar("T")
FIELDS = ("class", "rank", "step", "fix", "evidence")
NONE_WORDS = ("none", "all", "-")
"""What an answer says where no single rank, or no step, is at fault."""
MAX_TEXT = 1000
MAX_NUMBER = 10**9
TRIES = 3
"""Times that a question is asked again before the answer is given up."""


@dataclass(frozen=True)
class IncidentAnswer:
    """What the user says about an incident. A field that is None was not answered."""

    name: str | None = None
    """the class"""
    rank: int | str | None = None
    """a rank, or "none" """
    steps: tuple[int, int] | str | None = None
    """a range of steps, or "none" """
    fix: str | None = None
    evidence: str | None = None


def parse_answer(words: Sequence[str]) -> IncidentAnswer:
    """Parses `class=straggler rank=1 step=12 fix=replace-host "evidence=96.8 ms"`."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in FIELDS:
            raise ConfigError(
                f"{word!r} is not a part of an answer", f"expected {', '.join(f'{f}=...' for f in FIELDS)}"
            )
        if name in values:
            raise ConfigError(f"{name} is given twice", "expected every field once")
        values[name] = value[:MAX_TEXT]
    return IncidentAnswer(
        parse_choice("class", values["class"], CLASSES) if "class" in values else None,
        parse_rank(values["rank"]) if "rank" in values else None,
        parse_steps(values["step"]) if "step" in values else None,
        parse_choice("fix", values["fix"], FIXES) if "fix" in values else None,
        values.get("evidence"),
    )


def parse_choice(field: str, text: str, choices: Iterable[str]) -> str:
    """A name of a list, or its number in the list."""
    names = list(choices)
    text = text.strip()
    if text in names:
        return text
    if text.isdecimal() and 1 <= int(text[:6]) <= len(names):
        return names[int(text) - 1]
    raise ConfigError(f"{field}={text} is not known", f"expected one of {', '.join(names)}")


def parse_rank(text: str) -> int | str:
    if text.strip().lower() in NONE_WORDS:
        return "none"
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ConfigError(f"rank={text} is not a rank", "expected a number, or none if no single rank is at fault")
    return int(text)


def parse_steps(text: str) -> tuple[int, int] | str:
    if text.strip().lower() in NONE_WORDS:
        return "none"
    match = re.fullmatch(r"(\d{1,9})(?:\s*(?:-|:|\.\.)\s*(\d{1,9}))?", text.strip())
    if match is None:
        raise ConfigError(f"step={text} is not a step", "expected a number, a range such as 10-14, or none")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ConfigError(f"step={text} is an empty range", "expected the smaller number first")
    return first, last


def ask_answer(ask: Callable[[str], str], show: Callable[[str], None]) -> IncidentAnswer:
    """Asks for every field on the terminal."""
    show("Which class of fault is it?")
    for number, kind in enumerate(CLASSES.values(), 1):
        show(f"  {number:>2}  {kind.name:<20} {kind.meaning}")
    name = ask_field(ask, show, "class", lambda text: parse_choice("class", text, CLASSES))
    rank = ask_field(ask, show, "rank (a number, or none)", parse_rank)
    steps = ask_field(ask, show, "step at which it begins (a number, a range, or none)", parse_steps)
    show("Which fix is right?")
    for number, (fix, meaning) in enumerate(FIXES.items(), 1):
        show(f"  {number:>2}  {fix:<22} {meaning}")
    fix = ask_field(ask, show, "fix", lambda text: parse_choice("fix", text, FIXES))
    evidence = ask("evidence (paste a line or a figure that a command printed): ").strip()[:MAX_TEXT]
    return IncidentAnswer(name, rank, steps, fix, evidence or None)


def ask_field(ask: Callable[[str], str], show: Callable[[str], None], question: str, parse: Callable[[str], T]) -> T:
    for _ in range(TRIES):
        try:
            return parse(ask(f"{question}: "))
        except ConfigError as error:
            show(str(error))
            last = error
    raise last
