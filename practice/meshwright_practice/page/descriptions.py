"""What the page shows, as JSON: cards, runs, reviews and progress. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from meshwright_practice.cards.answers import shown_claims
from meshwright_practice.cards.card import Card, Relation
from meshwright_practice.cards.card_text import format_error, measured_side, sides
from meshwright_practice.cards.registry import KINDS
from meshwright_practice.cards.reviews import ReviewedCard
from meshwright_practice.cards.runner import ExperimentRun
from meshwright_practice.cards.schedule import CardState, ReviewQueue, format_due
from meshwright_practice.cards.verify import find_problems, named_values
from meshwright_practice.drawing.palette import LONG_UNIT, format_figure
from meshwright_practice.progress import PracticeProgress

DONE = {"labs": ("passed", True), "incidents": ("state", "answered"), "interviews": ("finished", True)}
"""Sections of the progress file -> the field that says that an entry is done, and its value."""
MAX_ENTRIES = 200
MAX_FIELDS = 12
"""What is shown of a section of the progress file, which is untrusted."""


def describe_question(card: Card, state: CardState, now: datetime) -> dict[str, Any]:
    """A card as it is asked: neither its answer nor which claims are true."""
    return brief(card, state, now) | {
        "ranks": card.experiment.ranks,
        "predictions": [{"question": item.question, "unit": item.unit} for item in card.predictions],
        "claims": [{"letter": letter, "text": claim.text} for letter, claim in shown_claims(card)],
        "knobs": [
            {"name": knob.name, "values": list(knob.values), "meaning": knob.meaning} for knob in card.experiment.knobs
        ],
        "chapter": card.chapter,
    }


def brief(card: Card, state: CardState, now: datetime) -> dict[str, Any]:
    """A card in a list."""
    ratings = [rating.name.lower() for _, rating in state.reviews]
    fields = {"card": card.id, "kind": card.kind, "question": card.question, "state": state.describe(now)}
    return fields | {
        "is_due": state.due is not None and state.due <= now,
        "is_new": state.due is None,
        "ratings": ratings[-8:],
    }


def describe_explanation(card: Card) -> dict[str, Any]:
    sources = [{"kind": item.kind, "title": item.title, "where": item.where} for item in card.sources]
    return {"answer": card.answer, "notes": card.notes, "mistake": card.mistake, "sources": sources}


def describe_run(card: Card, run: ExperimentRun) -> dict[str, Any]:
    """A run without a grade: the picture, the notes, the relations, and what is wrong."""
    value = run.to_json() | {"log": run.log, "problems": list(find_problems(card, run)), "relations": []}
    if run.observation is not None and named_values(card) <= run.observation.values.keys():
        value["relations"] = [describe_relation(card, run, relation, True) for relation in card.relations]
        value["relations"] += [describe_relation(card, run, relation, False) for relation in card.refuted]
    return value


def describe_relation(card: Card, run: ExperimentRun, relation: Relation, must_hold: bool) -> dict[str, Any]:
    """A relation with its measured sides; one that this run does not decide has only the left side."""
    assert run.observation is not None
    values, judged = run.observation.values, card.can_judge(relation, run.knobs)
    shown = sides(relation, values) if judged else measured_side(relation, values)
    holds = relation.holds(values) if judged else None
    return {"text": relation.text, "sides": shown, "judged": judged, "holds": holds, "must_hold": must_hold}


def describe_review(reviewed: ReviewedCard, now: datetime) -> dict[str, Any]:
    """A review: the run, the grade, the next due time and the explanation."""
    value = describe_run(reviewed.card, reviewed.run) | {"explanation": describe_explanation(reviewed.card)}
    value |= {"recorded": reviewed.state is not None, "reason": reviewed.reason, "predictions": [], "claims": []}
    value["graded"] = reviewed.grade is not None
    if reviewed.state is not None and reviewed.state.due is not None:
        value["due"] = format_due(reviewed.state.due, now)
    if reviewed.grade is not None:
        value["rating"] = reviewed.grade.rating.name.lower()
        value["predictions"] = [
            {
                "question": item.prediction.question,
                "unit": item.prediction.unit if len(item.prediction.unit) > LONG_UNIT else "",
                "predicted": format_figure(item.predicted, item.prediction.unit),
                "measured": format_figure(item.measured, item.prediction.unit),
                "error": format_error(item.error),
                "rating": item.rating.name.lower(),
            }
            for item in reviewed.grade.predictions
        ]
        value["claims"] = [
            {"letter": claim.letter, "text": claim.text, "chosen": claim.chosen, "true": claim.true}
            for claim in reviewed.grade.claims
        ]
    return value


def describe_queue(queue: ReviewQueue, states: Mapping[str, CardState], now: datetime) -> dict[str, Any]:
    """Today: what is left, and what was done."""
    today = [
        rating
        for state in states.values()
        for time, rating in state.reviews
        if time.astimezone(now.tzinfo).date() == now.date()
    ]
    return {
        "cards": [brief(card, states[card.id], now) for card in queue.cards],
        "due": len(queue.due),
        "new": len(queue.new),
        "postponed": queue.postponed,
        "next_due": format_due(queue.next_due, now) if queue.next_due is not None else "",
        "reviewed_today": len(today),
        "begun": sum(state.due is not None for state in states.values()),
        "total": len(states),
    }


def describe_deck(cards: Mapping[str, Card], states: Mapping[str, CardState], now: datetime) -> dict[str, Any]:
    """All cards by kind."""
    kinds = {
        kind: [brief(card, states[card.id], now) for card in cards.values() if card.kind == kind] for kind in KINDS
    }
    return {"kinds": [{"kind": kind, "cards": found} for kind, found in kinds.items() if found]}


def describe_progress(progress: PracticeProgress) -> dict[str, Any]:
    """Labs, incidents and interviews: whatever plain values their entries have, and how many are done."""
    found = {}
    for name, (field, value) in DONE.items():
        entries = [plain_entry(key, entry) for key, entry in list(getattr(progress, name).items())[:MAX_ENTRIES]]
        found[name] = {"entries": entries, "done": sum(entry["fields"].get(field) == value for entry in entries)}
    return found


def plain_entry(key: str, entry: Any) -> dict[str, Any]:
    """The numbers, texts and flags of an entry. The file is untrusted, and long texts are cut."""
    fields = {str(name)[:60]: plain_value(value) for name, value in entry.items()} if isinstance(entry, dict) else {}
    shown = [(name, value) for name, value in fields.items() if value is not None]
    return {"name": key[:120], "fields": dict(shown[:MAX_FIELDS])}


def plain_value(value: Any) -> bool | int | float | str | None:
    """A plain value as it is, flags by name as "2 of 5", and nothing for everything else."""
    if isinstance(value, dict) and value and all(isinstance(item, bool) for item in value.values()):
        return f"{sum(value.values())} of {len(value)}"
    return value[:200] if isinstance(value, str) else value if isinstance(value, bool | int | float) else None
