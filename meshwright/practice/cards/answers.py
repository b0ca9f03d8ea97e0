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
from meshwright.practice.cards.card import Card, Statement

PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNIT_WORDS = {"%": 0.01, "percent": 0.01, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
SMALL_PREFIXES = {"m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
NUMBER = re.compile(r"(?P<number>.*?[\d.)])\s*(?P<unit>(?:[A-Za-zµ%][A-Za-zµ%/ -]*)?)")
PREFIXED = re.compile(r"(Ki|Mi|Gi|Ti|k|M|G|T)(B|b|bytes|FLOPs?|parameters)?")
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
    match = NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    if match is None or len(text) > MAX_TEXT:
        raise ConfigError(f"{text[:MAX_TEXT]!r} is not a prediction", NUMBER_HINT)
    scale = unit_scale(match["unit"].strip()) / unit_scale(unit) if match["unit"].strip() else 1.0
    try:
        value = evaluate(ast.parse(match["number"].strip(), mode="eval").body) * scale
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise ConfigError(f"{text!r} is not a prediction", NUMBER_HINT) from None
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not a finite number", NUMBER_HINT)
    return value


def unit_scale(unit: str) -> float:
    """How many base units a unit is: 1 for "B" and for every word, 1024 for "KiB", 0.001 for "ms", 0.01 for "%"."""
    if unit in UNIT_WORDS:
        return UNIT_WORDS[unit]
    if len(unit) == 2 and unit[1] == "s" and unit[0] in SMALL_PREFIXES:
        return SMALL_PREFIXES[unit[0]]
    prefixed = PREFIXED.fullmatch(unit)
    return float(PREFIXES[prefixed[1]]) if prefixed else 1.0


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
