"""The verbs: entry points of the group `meshwright.verbs`, those of the areas and those of other distributions.

The dots in the name of an entry point are the spaces of its verb: `plan.schedule` is `meshwright plan schedule`. Its
value is a function whose docstring is "Verb: summary" and whose signature declares the arguments, as `args.py` says.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint
from itertools import groupby

from meshwright.base.cli.args import Verb
from meshwright.base.extensions import extensions, is_present, package
from meshwright.errors import ConfigError

GROUP = "meshwright.verbs"
AREAS = ("core", "planner", "insight", "prover", "rl", "ops")
"""The areas that have verbs, in the order in which `--help` lists them; other packages follow."""
DISTRIBUTIONS = {"practice": "meshwright-practice"}
"""Verb -> the distribution that brings it, where this one does not."""


@cache
def verbs() -> dict[str, EntryPoint]:
    """Verb -> its entry point. Verbs of Meshwright cannot be replaced by those of another distribution."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(extensions(GROUP), key=position):
        found.setdefault(entry.name.replace(".", " "), entry)
    if not found:
        raise ConfigError(
            "this copy of Meshwright is not installed, so its verbs are not known", "try pip install -e ."
        )
    return found


def position(entry: EntryPoint) -> tuple[int, str, bool, str]:
    """Where a verb stands in the list: after its area, and a verb of one word before groups such as `checkpoint`."""
    owner = package(entry)
    area = owner.removeprefix("meshwright.")
    return AREAS.index(area) if area in AREAS else len(AREAS), owner, "." in entry.name, entry.name


def find_verb(args: list[str]) -> str:
    """The verb that `args` start with; `plan schedule` takes precedence over `plan`."""
    matches = (verb for verb in verbs() if args[: len(verb.split())] == verb.split())
    name = max(matches, key=len, default=None)
    if name is not None:
        return name
    if args[0] in DISTRIBUTIONS:
        raise ConfigError(f"{args[0]} is not installed", f"try pip install {DISTRIBUTIONS[args[0]]}")
    group = [verb for verb in verbs() if verb.startswith(f"{args[0]} ")]
    if group:
        raise ConfigError(f"unknown verb {' '.join(args[:2])!r}", f"expected one of {', '.join(group)}")
    close = difflib.get_close_matches(args[0], [verb.split()[0] for verb in verbs()], n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(verbs())}"
    raise ConfigError(f"unknown verb {args[0]!r}", hint)


def load_verb(name: str) -> Verb:
    """Imports the function of a verb."""
    entry = verbs()[name]
    if not is_present(package(entry)):
        raise ConfigError(f"{name} is part of {package(entry)}, which is not installed", "try pip install meshwright")
    verb: Verb = entry.load()
    return verb


def summaries(names: Iterable[str]) -> list[str]:
    """Returns one line per verb, with the summary from its docstring."""
    return [f"  {name:<18} {summary(name)}" for name in names]


def summary(name: str) -> str:
    """What a verb does. A verb of another distribution that cannot be imported does not end the help of the others."""
    try:
        return first_line((load_verb(name).__doc__ or "").partition(": ")[2])
    except Exception as error:
        if package(verbs()[name]).startswith("meshwright"):
            raise
        return f"cannot be imported: {type(error).__name__}: {error}"


def summaries_by_package() -> list[str]:
    """Returns the summaries of all verbs under the name of the area, or of the other package, that has them."""
    lines: list[str] = []
    for owner, group in groupby(verbs(), key=lambda name: package(verbs()[name])):
        names = list(group)
        if not is_present(owner):
            lines += ["", f"{owner}: not installed", *(f"  {name}" for name in names)]
            continue
        rows = summaries(names)  # imports the package
        lines += ["", f"{owner}: {first_line(getattr(sys.modules.get(owner), '__doc__', None) or '')}", *rows]
    return lines


def first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")
