"""Pairwise covering arrays: few rows of levels of factors, among which is every pair of levels of two factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random

Row = tuple[str, ...]
"""One level of every factor, in their order."""
TRIES = 12
"""Rows among which the one with most new pairs is chosen; for a pair, the rows that may show that it is valid."""


def pairs_of(row: Row) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(combinations(enumerate(row), 2))


def covering_rows(factors: Mapping[str, Sequence[str]], is_valid: Callable[[Row], bool]) -> list[Row]:
    """Valid rows that together have every pair that a valid row has; the same ones each time."""
    draw, levels = Random(0), [list(of_factor) for of_factor in factors.values()]
    wanted = [
        ((first, a), (second, b))
        for first, second in combinations(range(len(levels)), 2)
        for a, b in product(levels[first], levels[second])
    ]
    missing, rows = set(wanted), list[Row]()
    for pair in wanted:
        if pair not in missing:
            continue
        completed = [complete(dict(pair), levels, missing, draw) for _ in range(TRIES)]
        completed.sort(key=lambda row: -len(pairs_of(row) & missing))
        if (best := next(filter(is_valid, completed), None)) is not None:
            rows.append(best)
            missing -= pairs_of(best)
    return rows


def complete(chosen: dict[int, str], levels: list[list[str]], missing: set, draw: Random) -> Row:
    """A row with these levels; each of the others, in a random order, is the one that makes most new pairs."""
    others = [factor for factor in range(len(levels)) if factor not in chosen]
    for factor in draw.sample(others, len(others)):
        shuffled = draw.sample(levels[factor], len(levels[factor]))
        news = {
            level: sum(tuple(sorted([(factor, level), other])) in missing for other in chosen.items())
            for level in shuffled
        }
        chosen[factor] = max(shuffled, key=news.__getitem__)
    return tuple(chosen[factor] for factor in range(len(levels)))
