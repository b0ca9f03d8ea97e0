"""The cards on state placement, communication and backpropagation are true on this machine, and can be false."""

from __future__ import annotations

import socket
from collections import Counter
from functools import cache

import pytest
from meshwright_practice.cards.card import Card, KnobValue, Observation
from meshwright_practice.cards.deck.communication import collectives, ddp, ddp_traps, experts, tensor_and_sequence
from meshwright_practice.cards.deck.state import backpropagation, fsdp, placement, sharding, sharding_traps
from meshwright_practice.experiments.communication.socket_bytes import received_bytes

MODULES = (
    backpropagation,
    collectives,
    ddp,
    ddp_traps,
    experts,
    fsdp,
    placement,
    sharding,
    sharding_traps,
    tensor_and_sequence,
)
CARDS = {card.id: card for module in MODULES for card in module.CARDS}
CHAPTERS = {
    f"handbook/{name}.md"
    for name in (
        "map", "data-parallelism", "sharding", "tensor-and-sequence", "pipeline", "experts", "collectives", "memory",
        "numerics", "data-and-resume", "failure-plane", "playbook", "judgement",
    )
}  # fmt: skip
ITEMS = 156
FIRST_OF_EXPERIMENT = list({card.experiment.run: card for card in reversed(CARDS.values())}.values())
ALTERNATIVES = list(
    {
        (card.experiment.run, knob.name, value): (card.id, knob.name, value)
        for card in CARDS.values()
        for knob in card.experiment.knobs
        for value in knob.values[1:]
    }.values()
)


@cache
def observe(run: str, knobs: tuple[tuple[str, KnobValue], ...]) -> Observation:
    card = next(card for card in CARDS.values() if card.experiment.run == run)
    return card.experiment.load()(dict(knobs))


def observe_card(card: Card) -> Observation:
    return observe(card.experiment.run, tuple(card.experiment.defaults().items()))


def check_card(card: Card) -> None:
    values = observe_card(card).values
    assert not [relation.text for relation in card.broken(values)]
    assert not [relation.text for relation in card.relations if relation.inverted().holds(values)]
    assert all(relation.inverted().holds(values) for relation in card.refuted)
    truths = {claim.relation.holds(values) for claim in card.claims}
    assert truths in (set(), {True, False}), "all claims are right, or all are wrong"
    for prediction in card.predictions:
        assert values[prediction.value] != 0, f"an error relative to 0: {prediction.value}"


@pytest.mark.long
@pytest.mark.parametrize("card", FIRST_OF_EXPERIMENT, ids=lambda card: card.id)
def test_card_is_true_on_this_machine(card):
    check_card(card)


@pytest.mark.long
@pytest.mark.parametrize("card_id", CARDS)
def test_every_card_is_true_on_this_machine(card_id):
    check_card(CARDS[card_id])


@pytest.mark.long
@pytest.mark.parametrize(("card_id", "name", "value"), ALTERNATIVES)
def test_experiment_runs_with_every_value_of_a_knob(card_id, name, value):
    experiment = CARDS[card_id].experiment
    observation = experiment.load()(experiment.defaults() | {name: value})
    assert observation.values.keys() >= {
        prediction.value
        for card in CARDS.values()
        if card.experiment.run == experiment.run
        for prediction in card.predictions
    }


def test_received_bytes_are_those_of_this_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            before = received_bytes()
            sender.sendall(b"x" * 1000)
            receiver.recv(1000, socket.MSG_WAITALL)
            assert received_bytes() == before + 1000


def test_cards_on_collectives_hold_where_connections_are_not_counted(monkeypatch):
    monkeypatch.setattr("meshwright_practice.experiments.communication.collectives.received_bytes", lambda: 0)
    experiment = CARDS["ring-all-reduce-bytes"].experiment
    observation = experiment.load()(experiment.defaults())
    assert "not measured" in observation.notes[0]
    cards = [card for card in CARDS.values() if card.experiment.run == experiment.run]
    assert not [relation.text for card in cards for relation in card.broken(observation.values)]


def test_ids_of_cards_are_unique():
    counts = Counter(card.id for module in MODULES for card in module.CARDS)
    assert not [card_id for card_id, count in counts.items() if count > 1]


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.id)
def test_card_is_complete(card):
    assert card.question
    assert card.answer
    assert card.notes
    assert card.mistake
    assert card.relations
    assert bool(card.predictions) != bool(card.claims)
    assert card.chapter in CHAPTERS
    assert card.items
    assert all(1 <= item <= ITEMS for item in card.items)
    assert len(card.answer.split()) <= 130  # under a minute at a speaking rate of 150 words
    kinds = {source.kind for source in card.sources}
    assert "own run" in kinds
    assert kinds & {"official", "paper"}
    [command] = [source.where for source in card.sources if source.kind == "own run"]
    assert command == f"meshwright practice cards --run {card.id}"


@pytest.mark.parametrize(
    "card", [card for card in CARDS.values() if card.id.startswith("trap-")], ids=lambda card: card.id
)
def test_trap_refutes_a_statement(card):
    assert card.refuted
