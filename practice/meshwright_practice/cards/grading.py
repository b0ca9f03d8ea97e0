"""Grades an answer by what was measured: the error of the prediction sets the rating, not the reader. Torch-free.

A number: within the tolerance of the prediction Easy, within 15 % Good, of the same sign and within a factor of two
Hard, else Again. A choice of claims: all right is Easy where four or more could be wrong, and Good otherwise, since two
claims are right by chance in one of four cases; at least two thirds right is Hard, less is Again. The worst counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from meshwright_practice.cards.answers import shown_claims
from meshwright_practice.cards.card import Card, Prediction

GOOD_ERROR = 0.15
HARD_FACTOR = 2.0
EASY_CLAIMS = 4
"""Claims of a card from which on a right choice is hardly luck."""
HARD_SHARE = 2 / 3
"""Share of right decisions below which nothing is known: half of them are right by chance."""


class Rating(IntEnum):
    """The ratings of FSRS."""

    AGAIN = 1
    HARD = 2
    GOOD = 3
    EASY = 4


@dataclass(frozen=True)
class GradedPrediction:
    """One prediction beside the measured value."""

    prediction: Prediction
    predicted: float
    measured: float
    error: float
    """relative to the measured value"""
    rating: Rating


@dataclass(frozen=True)
class GradedClaim:
    """One claim: whether it was held true, and whether it is."""

    letter: str
    text: str
    chosen: bool
    true: bool


@dataclass(frozen=True)
class Grade:
    """All answers to a card, and the rating of the worst."""

    predictions: tuple[GradedPrediction, ...]
    claims: tuple[GradedClaim, ...]
    rating: Rating

    @property
    def error(self) -> float | None:
        """The largest error of a prediction."""
        return max((graded.error for graded in self.predictions), default=None)


def relative_error(predicted: float, measured: float) -> float:
    """The error relative to the measured value; of a measured zero, every other prediction is infinitely off."""
    if predicted == measured:
        return 0.0
    return abs(predicted - measured) / abs(measured) if measured else math.inf


def rate_prediction(predicted: float, measured: float, tolerance: float) -> Rating:
    error = relative_error(predicted, measured)
    if error <= tolerance:
        return Rating.EASY
    if error <= GOOD_ERROR:
        return Rating.GOOD
    ratio = predicted / measured if measured else math.inf
    return Rating.HARD if 1 / HARD_FACTOR <= ratio <= HARD_FACTOR else Rating.AGAIN


def rate_choice(right: int, claims: int) -> Rating:
    if right == claims:
        return Rating.EASY if claims >= EASY_CLAIMS else Rating.GOOD
    return Rating.HARD if right / claims >= HARD_SHARE else Rating.AGAIN


def grade(card: Card, predicted: Sequence[float], chosen: set[str], values: Mapping[str, float]) -> Grade:
    """Grades the predictions, in the order of the card, and the letters of the claims that are held true."""
    predictions = tuple(
        GradedPrediction(
            prediction,
            number,
            values[prediction.value],
            relative_error(number, values[prediction.value]),
            rate_prediction(number, values[prediction.value], prediction.tolerance),
        )
        for prediction, number in zip(card.predictions, predicted, strict=True)
    )
    claims = tuple(
        GradedClaim(letter, claim.text, letter in chosen, claim.relation.holds(values))
        for letter, claim in shown_claims(card)
    )
    ratings = [graded.rating for graded in predictions]
    if claims:
        ratings.append(rate_choice(sum(claim.chosen == claim.true for claim in claims), len(claims)))
    return Grade(predictions, claims, min(ratings))
