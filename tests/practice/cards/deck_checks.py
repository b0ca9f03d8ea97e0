"""What a card must have, and how its relations are mutated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshwright_practice.cards.card import Card, Relation
from meshwright_practice.cards.registry import KINDS

MAX_RANKS = 4
WIDENED = ("==", "<=", ">=")
"""Comparisons that a tolerance widens; the others are narrowed by it."""


def schema_problems(card: Card, experiments: bool = True) -> list[str]:
    """What is missing in a card; the values that it names are checked when its experiment runs."""
    texts = {"question": card.question, "answer": card.answer, "notes": card.notes, "mistake": card.mistake}
    problems = [f"no {name}" for name, text in texts.items() if not text.strip()]
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", card.id):
        problems.append(f"the id {card.id} is not in lower case with hyphens")
    if card.kind not in KINDS:
        problems.append(f"{card.kind} is not a kind")
    if not card.relations:
        problems.append("no relation")
    if not card.predictions and not card.claims:
        problems.append("neither predictions nor claims")
    if len(card.claims) == 1:
        problems.append("a single claim is no choice")
    if not card.sources:
        problems.append("no source")
    if not card.items:
        problems.append("no handbook item")
    relations = [*card.relations, *card.refuted, *(claim.relation for claim in card.claims)]
    problems += [f"a relation compares {item.left} with itself" for item in relations if item.left == item.right]
    problems += [
        f"{item.text!r} accepts everything" for item in relations if item.tolerance >= 1 and item.comparison in WIDENED
    ]
    problems += ["a relation has no text" for item in (*card.relations, *card.refuted) if not item.text.strip()]
    problems += [
        f"{item.value} has a tolerance outside of [0, 1)" for item in card.predictions if not 0 <= item.tolerance < 1
    ]
    experiment = card.experiment
    if not 1 <= experiment.ranks <= MAX_RANKS:
        problems.append(f"{experiment.ranks} ranks are not 1 to {MAX_RANKS}")
    names = [knob.name for knob in experiment.knobs]
    if len(set(names)) < len(names):
        problems.append("two knobs have the same name")
    problems += [f"the knob {knob.name} has no value" for knob in experiment.knobs if not knob.values]
    problems += [f"the knob {knob.name} has no meaning" for knob in experiment.knobs if not knob.meaning.strip()]
    if experiments:
        problems += experiment_problems(card)
    return problems


def experiment_problems(card: Card) -> list[str]:
    try:
        run = card.experiment.load()
    except (ImportError, AttributeError) as error:
        return [f"the experiment {card.experiment.run} does not exist: {error}"]
    return [] if callable(run) else [f"the experiment {card.experiment.run} is not a function"]


def relation_survives_mutation(relation: Relation, values: Mapping[str, float]) -> bool:
    """Whether a relation still holds after its right side was moved beyond what its comparison and tolerance allow."""
    right = values[relation.right] if isinstance(relation.right, str) else relation.right
    left = values[relation.left]
    return any(replace(relation, right=moved).holds(values) for moved in moved_beyond(relation, left, right))


def moved_beyond(relation: Relation, left: float, right: float) -> list[float]:
    """Right sides that make a true relation false."""
    if relation.comparison == "==":
        # A number within the tolerance of `right` is outside of that of `right` times this factor.
        factor = 1.01 * (1 + relation.tolerance) / (1 - relation.tolerance)
        return [right * factor, right / factor] if right else [1.0 + abs(left), -1.0 - abs(left)]
    if relation.comparison == "!=":
        return [left]
    widened = relation.comparison in WIDENED
    far = 2 * (1.0 + abs(left)) / (1 - relation.tolerance if widened else 1)
    return [far] if relation.comparison in (">", ">=") else [-far]
