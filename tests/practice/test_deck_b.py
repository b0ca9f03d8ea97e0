"""The cards on schedules, numerics, data, recovery, diagnosis and judgement are true here, and could be false."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from meshwright_practice.cards.card import Card, Observation, Relation
from meshwright_practice.cards.deck import (
    batches,
    data_and_recovery,
    diagnosis,
    large_batches,
    numerics,
    scaling,
    scenarios,
    schedules,
    system_questions,
)
from meshwright_practice.pictures import Bars, Curves, GanttChart, HeatMap

MODULES = (
    batches,
    data_and_recovery,
    diagnosis,
    large_batches,
    numerics,
    scaling,
    scenarios,
    schedules,
    system_questions,
)
CARDS: tuple[Card, ...] = tuple(card for module in MODULES for card in module.CARDS)
ITEMS = {
    *(43, 44, 45, 52, 53, 55, 56, 57, 58, 59, 60, 61, 62, 63, 69, 71, 72),
    *(100, 101, 102, 103, 104, 106, 107, 108, 109),
    *(114, 115, 116, 117, 126, 127),
    *(135, 136, 142, 143, 144, 145, 146, 148, 149, 150, 151, 152, 154, 155),
}
"""Handbook items that these cards make real."""
TRAPS = 17
CHAPTERS = ("map", "data-parallelism", "sharding", "tensor-and-sequence", "pipeline", "experts", "collectives")
CHAPTERS += ("memory", "numerics", "data-and-resume", "failure-plane", "playbook", "judgement")


@cache
def observe(run: str, knobs: tuple[tuple[str, object], ...]) -> Observation:
    """One run per experiment and knobs: several cards share it."""
    card = next(card for card in CARDS if key_of(card) == (run, knobs))
    return card.experiment.load()(card.experiment.defaults())


def key_of(card: Card) -> tuple[str, tuple[tuple[str, object], ...]]:
    return card.experiment.run, tuple(sorted(card.experiment.defaults().items()))


def one_per_function() -> Iterator[Card]:
    seen: set[str] = set()
    for card in CARDS:
        if card.experiment.run not in seen:
            seen.add(card.experiment.run)
            yield card


def require_true(card: Card) -> None:
    """The relations hold and their inverses fail; wrong statements are false; all names exist; the picture has data."""
    observation = observe(*key_of(card))
    values = observation.values
    assert all(isinstance(value, float) for value in values.values())
    assert [relation.text for relation in card.broken(values)] == []
    assert [relation.text for relation in card.relations if relation.inverted().holds(values)] == []
    decided = [claim.relation.holds(values) for claim in card.claims]
    assert not decided or {True, False} == set(decided), "a choice has right and wrong claims"
    assert all(values[prediction.value] for prediction in card.predictions), "an error relative to 0 is infinite"
    assert has_data(observation)


def has_data(observation: Observation) -> bool:
    picture = observation.picture
    match picture:
        case Bars():
            return bool(picture.parts) and all(len(part) == len(picture.labels) for part in picture.parts.values())
        case GanttChart():
            return bool(picture.spans) and all(span.end > span.begin for span in picture.spans)
        case HeatMap():
            shape = (len(picture.rows), {len(picture.columns)})
            return (len(picture.values), {len(row) for row in picture.values}) == shape
        case Curves():
            return bool(picture.lines) and all(len(line) == len(picture.x) for line in picture.lines.values())


@pytest.mark.long
@pytest.mark.parametrize("card", tuple(one_per_function()), ids=lambda card: card.experiment.run)
def test_one_card_of_every_experiment_is_true(card: Card) -> None:
    require_true(card)


@pytest.mark.long
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.id)
def test_every_card_is_true(card: Card) -> None:
    require_true(card)


def other_values(card: Card) -> Iterator[dict[str, object]]:
    """The default knobs with one of them changed."""
    for knob in card.experiment.knobs:
        for value in knob.values[1:]:
            yield card.experiment.defaults() | {knob.name: value}


@pytest.mark.long
@pytest.mark.parametrize("card", tuple(one_per_function()), ids=lambda card: card.experiment.run)
def test_experiments_run_with_other_knobs(card: Card) -> None:
    names = set(observe(*key_of(card)).values)
    for knobs in other_values(card):
        observation = card.experiment.load()(knobs)
        assert set(observation.values) == names, knobs
        assert has_data(observation), knobs


def statements(card: Card) -> list[Relation]:
    return [*card.relations, *card.refuted, *(claim.relation for claim in card.claims)]


def test_cards_are_complete() -> None:
    assert len({card.id for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", card.id)
        assert all((card.relations, card.refuted, card.items, card.notes, card.mistake)), card.id
        assert bool(card.predictions) != bool(card.claims), f"{card.id} is graded in one way"
        assert len(card.claims) in (0, 4, 5), card.id
        assert len(card.answer.split()) <= 130, f"{card.id} takes more than a minute to say"
        assert {source.kind for source in card.sources} > {"own run"}, card.id
        assert f"meshwright practice cards --run {card.id}" in [source.where for source in card.sources]
        assert card.chapter.removeprefix("handbook/").removesuffix(".md") in CHAPTERS, card.id
        assert all(statement.text for statement in statements(card))


def test_traps_present_the_wrong_statement() -> None:
    traps = [card for card in CARDS if card.id.startswith("trap-")]
    assert len(traps) == TRAPS
    assert [card.id for card in traps if "'" not in card.question] == []


def test_cards_cover_their_handbook_items() -> None:
    assert {item for card in CARDS for item in card.items} >= ITEMS
