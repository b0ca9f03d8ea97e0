"""Reads what a person answers: a number or a formula for a prediction, letters for claims. Torch-free."""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import re
from collections.abc import Callable, Sequence
from string import ascii_lowercase

from meshwright.errors import ConfigError
from meshwright_practice.cards.card import Card, Statement

PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
RATIOS = {"": 1.0, "x": 1.0, "times": 1.0, "share": 1.0, "%": 0.01, "percent": 0.01}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
TIME_WORDS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
NUMBER = re.compile(r"(?P<number>.*?[\d.)])\s*(?P<unit>(?:[A-Za-zµ%][A-Za-zµ%/' -]*)?)")
PREFIXED = re.compile(r"(?P<prefix>Ki|Mi|Gi|Ti|k|M|G|T)?(?P<base>B|bytes?|FLOPs?|parameters)")
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
OPERATORS: dict[type[ast.operator | ast.unaryop], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_TEXT = 200
NUMBER_HINT = "expected a number or a formula, such as 12.5M, 1.5 GiB, 3/4 or 2*(4-1)/4"
NO_CLAIM = "none"
"""The answer that every claim is false."""


def parse_number(text: str, unit: str = "") -> float:
    """A prediction in `unit`: a number or arithmetic on numbers. If a unit follows, the number is converted from it."""
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{text[:MAX_TEXT]!r} is not a prediction", NUMBER_HINT)
    plain = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text.strip().replace("_", ""))
    if "," in plain:
        raise ConfigError(f"{text!r} has a comma that does not separate thousands", "expected 1.5 or 12,288")
    match = NUMBER.fullmatch(without_unit(plain, unit))
    if match is None:
        raise ConfigError(f"{text!r} is not a prediction", NUMBER_HINT)
    given = match["unit"].strip()
    scale = convert_unit(given, unit) if given else 1.0
    if scale is None:
        named = f"the unit of this prediction is {unit}" if unit else "this prediction has no unit"
        raise ConfigError(f"{text!r} is in {given!r}, but {named}", "expected a number without a unit, or in this unit")
    try:
        value = evaluate(ast.parse(match["number"].strip(), mode="eval").body) * scale
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise ConfigError(f"{text!r} is not a prediction", NUMBER_HINT) from None
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not a finite number", NUMBER_HINT)
    return value


def without_unit(text: str, unit: str) -> str:
    """The text without the unit of the prediction at its end, which may be several words, in the singular too. Case
    counts for units such as GB, since Gb are bits.
    """
    fold = str.casefold if PREFIXED.fullmatch(unit) is None else str
    for word in (unit, unit.removesuffix("s")):
        before = text[: len(text) - len(word)]
        if word and fold(text).endswith(fold(word)) and re.search(r"[\d.)\s]$", before):
            return before.rstrip()
    return text


def convert_unit(given: str, unit: str) -> float | None:
    """How many of `unit` one of `given` is; None if they do not fit. A prefix alone, as in "12.5M", counts base units:
    bytes of a prediction in GiB.
    """
    found, wanted = measure(given), measure(unit)
    if given in PREFIXES and (wanted is None or wanted[0] != "time"):
        return PREFIXES[given] / (wanted[1] if wanted is not None else 1.0)
    return found[1] / wanted[1] if found is not None and wanted is not None and found[0] == wanted[0] else None


def measure(unit: str) -> tuple[str, float] | None:
    """What a unit measures, and how many base units it is: 1024 bytes for "KiB", 0.001 s for "ms", 0.01 for "%"; None
    for any other word.
    """
    if unit in RATIOS or unit.startswith("of "):
        return "ratio", RATIOS.get(unit, 1.0)
    if unit in TIMES or unit in TIME_WORDS:
        return "time", (TIMES | TIME_WORDS)[unit]
    prefixed = PREFIXED.fullmatch(unit)
    if prefixed is None:
        return None
    base = prefixed["base"]
    kind = "bytes" if base in ("B", "byte", "bytes") else base.removesuffix("s")
    return kind, float(PREFIXES[prefixed["prefix"]]) if prefixed["prefix"] else 1.0


def evaluate(node: ast.expr) -> float:
    """The value of an arithmetic expression; raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return float(OPERATORS[type(op)](evaluate(left), evaluate(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return float(OPERATORS[type(op)](evaluate(operand)))
    raise ValueError


def shown_claims(card: Card) -> list[tuple[str, Statement]]:
    """The claims with their letters, in an order that depends on the id of the card and says nothing about them."""
    ordered = sorted(card.claims, key=lambda claim: hashlib.sha256(f"{card.id}\n{claim.text}".encode()).digest())
    return list(zip(ascii_lowercase, ordered, strict=False))


def parse_choice(card: Card, texts: Sequence[str]) -> set[str]:
    """The letters of the claims that are held true, such as "a c", "ac" or "none"."""
    text = " ".join(texts).strip().lower()
    known = {letter for letter, _ in shown_claims(card)}
    chosen = set() if text == NO_CLAIM else set(re.sub(r"[\s,]+", "", text))
    if not text or not chosen <= known:
        raise ConfigError(
            f"{text[:MAX_TEXT]!r} is not a choice of claims",
            f"expected the letters of the true claims, of {' '.join(sorted(known))}, or {NO_CLAIM}",
        )
    return chosen
