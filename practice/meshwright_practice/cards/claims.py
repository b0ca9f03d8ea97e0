"""Writes claims of cards, whose relation has the words of the claim. Torch-free."""

from __future__ import annotations

from meshwright_practice.cards.card import Comparison, Relation, Statement


def claim(text: str, left: str, comparison: Comparison, right: str | float, tolerance: float = 0.0) -> Statement:
    """A claim that is true where `left` compares with `right` as stated."""
    return Statement(text, Relation(text, left, comparison, right, tolerance))
