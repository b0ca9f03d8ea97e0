"""A review of a card: the answers, the run, the grade and what is recorded. Terminal and page share it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwright.base.io import finite
from meshwright.errors import ConfigError
from meshwright_practice.cards.answers import parse_choice, parse_number
from meshwright_practice.cards.card import Card
from meshwright_practice.cards.grading import Grade, grade
from meshwright_practice.cards.runner import ExperimentRun
from meshwright_practice.cards.schedule import CardReview, CardState, record_review
from meshwright_practice.cards.verify import find_problems


@dataclass(frozen=True)
class Answers:
    """What the reader states before the run."""

    predicted: tuple[float, ...]
    chosen: frozenset[str]


@dataclass(frozen=True)
class ReviewedCard:
    """A review of a card. Without a grade the experiment failed, or the card is wrong here; without a state nothing was
    recorded.
    """

    card: Card
    run: ExperimentRun
    grade: Grade | None
    state: CardState | None
    reason: str = ""
    """why a review with a grade is not recorded"""
    is_error: bool = False
    """whether the reason is that the progress file cannot be written"""

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"card": self.card.id, "run": self.run.to_json(), "recorded": self.state is not None}
        value["reason"] = self.reason
        value["problems"] = list(find_problems(self.card, self.run))
        if self.state is not None and self.state.due is not None:
            value["due"] = self.state.due.isoformat()
        if self.grade is not None:
            value["rating"] = self.grade.rating.name.lower()
            value["error"] = self.grade.error
            value["predictions"] = [
                {"value": item.prediction.value, "predicted": item.predicted, "measured": item.measured}
                | {"unit": item.prediction.unit, "error": item.error}
                for item in self.grade.predictions
            ]
            value["claims"] = [
                {"text": claim.text, "chosen": claim.chosen, "true": claim.true} for claim in self.grade.claims
            ]
        result: dict[str, Any] = finite(value)
        return result


def take_answers(card: Card, texts: Sequence[str]) -> Answers:
    """Answers given as arguments: one number per prediction, and then the letters of the claims."""
    count = len(card.predictions)
    wanted = f"{count} number{'' if count == 1 else 's'}" + (
        " and the letters of the true claims" if card.claims else ""
    )
    if len(texts) < count + bool(card.claims) or (not card.claims and len(texts) > count):
        raise ConfigError(f"--answer has {len(texts)} values for the card {card.id}", f"expected {wanted}")
    chosen = parse_choice(card, texts[count:]) if card.claims else set()
    predicted = tuple(parse_number(text, item.unit) for text, item in zip(texts, card.predictions, strict=False))
    return Answers(predicted, frozenset(chosen))


def complete_review(
    card: Card, answers: Answers, run: ExperimentRun, path: Path, now: datetime, report: Callable[[str], None]
) -> ReviewedCard:
    """Grades the answers by what was measured, and records the review. Where the experiment failed or the card is wrong
    on this machine, the reader is not to blame, and nothing is recorded. A file that cannot be written costs the
    record, but not the grade; with knobs that do not decide the card, the grade is shown and not recorded either.
    """
    if run.observation is None or find_problems(card, run):
        return ReviewedCard(card, run, None, None)
    graded = grade(card, answers.predicted, set(answers.chosen), run.observation.values)
    if not card.can_grade(run.knobs):
        return ReviewedCard(card, run, graded, None, "relations of this card are stated for the default settings")
    try:
        state = record_review(path, card.id, CardReview.of(graded, run.knobs, now), report)
    except OSError as error:
        return ReviewedCard(card, run, graded, None, f"{path}: {error.strerror}", is_error=True)
    except ConfigError as error:
        return ReviewedCard(card, run, graded, None, str(error), is_error=True)
    return ReviewedCard(card, run, graded, state)
