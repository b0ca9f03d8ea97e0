"""All cards of the deck, found by their modules, and the lookup of one by its id. Torch-free."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import chain, zip_longest
from types import ModuleType
from typing import get_args

from meshwright.errors import ConfigError
from meshwright_practice.cards import deck
from meshwright_practice.cards.card import Card, Experiment, Kind, KnobValue

KINDS: tuple[Kind, ...] = get_args(Kind)


@cache
def all_cards() -> Mapping[str, Card]:
    """The cards of every module of `deck/`, in the order of the modules' names."""
    return collect_cards(deck)


def collect_cards(package: ModuleType) -> dict[str, Card]:
    """Imports every module of a package that has CARDS; raises ConfigError if two cards have the same id."""
    cards: dict[str, Card] = {}
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    for name in sorted(module.name for module in found if not module.ispkg):
        for card in import_module(name).CARDS:
            if card.id in cards:
                raise ConfigError(f"{name} has a second card with the id {card.id}", "expected one")
            cards[card.id] = card
    return cards


def find_card(cards: Mapping[str, Card], card_id: str) -> Card:
    """The card with an id; raises ConfigError with the closest id if there is none."""
    if card_id in cards:
        return cards[card_id]
    close = difflib.get_close_matches(card_id, cards, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"there is no card {card_id!r}", f"{hint}try meshwright practice cards --list")


def teaching_order(cards: Mapping[str, Card]) -> list[Card]:
    """The order in which new cards are introduced: the kinds take turns, so that a day is not all about one."""
    by_kind = [[card for card in cards.values() if card.kind == kind] for kind in KINDS]
    return [card for card in chain.from_iterable(zip_longest(*by_kind)) if card is not None]


def parse_knobs(experiment: Experiment, settings: Sequence[str]) -> dict[str, KnobValue]:
    """The knobs of an experiment: its defaults, and `name=value` for the others. A value must be one of the listed."""
    knobs = experiment.defaults()
    for setting in settings:
        name, equals, text = setting.partition("=")
        knob = next((knob for knob in experiment.knobs if knob.name == name), None)
        if knob is None or not equals:
            names = ", ".join(knob.name for knob in experiment.knobs) or "none: this experiment has no knobs"
            raise ConfigError(f"--set {setting} names no knob of this card", f"expected NAME=VALUE with one of {names}")
        value = next((value for value in knob.values if str(value).lower() == text.strip().lower()), None)
        if value is None:
            raise ConfigError(f"--set {setting} is not possible", f"expected one of {', '.join(map(str, knob.values))}")
        knobs[name] = value
    return knobs
