"""Runs the experiments of cards and checks every relation on this machine. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright_practice.cards.card import Card
from meshwright_practice.cards.runner import ExperimentRun, ExperimentRunner


@dataclass(frozen=True)
class VerifiedCard:
    """A card, the run of its experiment with the default knobs, and what is wrong with it."""

    card: Card
    run: ExperimentRun
    problems: tuple[str, ...]
    shared_with: str = ""
    """the card whose run this is too, since both have the same experiment"""

    def to_json(self) -> dict[str, Any]:
        return {
            "card": self.card.id,
            "problems": list(self.problems),
            "seconds": self.run.seconds,
            "peak_bytes": self.run.peak_bytes,
            "shared_with": self.shared_with,
        }


def find_problems(card: Card, run: ExperimentRun) -> tuple[str, ...]:
    """Why a card is not true on this machine: no result, a value that is missing, a relation that does not hold."""
    if run.observation is None:
        return (f"the experiment has no result: {run.failure}",)
    values = run.observation.values
    if missing := sorted(named_values(card) - values.keys()):
        return tuple(f"the experiment has no value {name}" for name in missing)
    if dict(run.knobs) != card.experiment.defaults():  # relations are stated for the default knobs
        return ()
    false = [f"does not hold: {relation.text}" for relation in card.relations if not relation.holds(values)]
    return (*false, *(f"is not refuted: {relation.text}" for relation in card.refuted if relation.holds(values)))


def named_values(card: Card) -> set[str]:
    """The names of the values that relations, predictions and claims of a card refer to."""
    relations = [*card.relations, *card.refuted, *(claim.relation for claim in card.claims)]
    named = {side for relation in relations for side in (relation.left, relation.right) if isinstance(side, str)}
    return named | {prediction.value for prediction in card.predictions}


def verify_cards(cards: Sequence[Card], runner: ExperimentRunner) -> Iterator[VerifiedCard]:
    """Runs every distinct experiment once, with its default knobs, and checks the cards that refer to it."""
    runs: dict[tuple[str, str], tuple[ExperimentRun, str]] = {}
    for card in cards:
        knobs = card.experiment.defaults()
        key = (card.experiment.run, repr(sorted(knobs.items())))
        known = key in runs
        if not known:
            runs[key] = (runner.run(card.experiment, knobs), card.id)
        run, first = runs[key]
        yield VerifiedCard(card, run, find_problems(card, run), first if known else "")
