"""Numbers with units in a text, and whether one of them agrees with a figure within a factor."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS: dict[str, tuple[str, float]] = {
    "b": ("bytes", 1),
    "byte": ("bytes", 1),
    "bytes": ("bytes", 1),
    "kb": ("bytes", 1e3),
    "mb": ("bytes", 1e6),
    "gb": ("bytes", 1e9),
    "tb": ("bytes", 1e12),
    "kib": ("bytes", 2**10),
    "mib": ("bytes", 2**20),
    "gib": ("bytes", 2**30),
    "tib": ("bytes", 2**40),
    "us": ("seconds", 1e-6),
    "ms": ("seconds", 1e-3),
    "s": ("seconds", 1),
    "sec": ("seconds", 1),
    "second": ("seconds", 1),
    "seconds": ("seconds", 1),
    "min": ("seconds", 60),
    "minutes": ("seconds", 60),
    "%": ("share", 0.01),
    "percent": ("share", 0.01),
    "x": ("ratio", 1),
    "times": ("ratio", 1),
}
"""unit -> (dimension, factor to the base unit)"""
NUMBER = re.compile(
    r"(?<![\w.])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?)\s*"
    r"(%|[kmgt]i?b\b|bytes?\b|b\b|us\b|ms\b|s\b|sec\b|seconds?\b|min\b|minutes\b|percent\b|x\b|times\b)",
    re.IGNORECASE,
)
MAX_NUMBERS = 200


@dataclass(frozen=True)
class StatedQuantity:
    value: float
    """in bytes, seconds, a share of 1, or a ratio"""
    dimension: str
    text: str


def quantities(text: str) -> list[StatedQuantity]:
    """The numbers with units in a text, in order."""
    found = []
    for match in NUMBER.finditer(text):
        dimension, factor = UNITS[match[2].lower()]
        found.append(StatedQuantity(float(match[1].replace(",", "")) * factor, dimension, match[0]))
        if len(found) == MAX_NUMBERS:
            break
    return found


@dataclass(frozen=True)
class Figure:
    """A figure of the planner that an answer may state."""

    name: str
    value: float
    dimension: str


def agreeing(
    text: str, figures: list[Figure], factor: float, given: tuple[Figure, ...] = ()
) -> tuple[StatedQuantity, Figure] | None:
    """The first number of the text that is within `factor` of a figure of its dimension. A number that repeats one of
    the question's (`given`) does not count.
    """
    for quantity in quantities(text):
        if any(quantity.dimension == each.dimension and is_rounded(quantity.value, each.value) for each in given):
            continue
        for figure in figures:
            same = quantity.dimension == figure.dimension and quantity.value > 0 and figure.value > 0
            if same and 1 / factor <= quantity.value / figure.value <= factor:
                return quantity, figure
    return None


def is_rounded(value: float, given: float) -> bool:
    """Whether a number is a figure of the question, in binary or decimal units, rounded."""
    return any(abs(value / scale - given) <= 0.02 * given for scale in (1.0, 1e9 / 2**30))
