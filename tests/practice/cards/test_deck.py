"""Every card of the deck is complete, and its claims are true on this machine and false when they are inverted."""

from __future__ import annotations

import pytest
from meshwright_practice.cards.card import Relation
from meshwright_practice.cards.registry import all_cards, collect_cards, find_card, teaching_order
from meshwright_practice.cards.runner import ExperimentRunner, RunLimits
from meshwright_practice.cards.schedule import CARDS_PER_DAY
from meshwright_practice.cards.verify import find_problems, verify_cards

from meshwright.errors import ConfigError
from tests.practice.cards.deck_checks import relation_survives_mutation, schema_problems
from tests.practice.cards.fake_cards import CLAIMS, PREDICTED, WRONG

CARDS = all_cards()
REVIEW_DAY_SECONDS = 600.0
"""What a day of twenty cards may take, of which the experiments are the machine's part."""
SLOW_EXPERIMENTS = {
    "batches:batch_sweep",
    "communication.axis_traffic:batch_dependence",
    "communication.links:tensor_placement",
    "numerics:checkpointed_run",
    "recovery:drop_one",
    "recovery:identity",
    "recovery:killed_save",
    "recovery:signals",
    "schedules:pipeline_run",
    "state.fsdp_units:lifecycle",
    "state.shard_levels:levels",
    "verdicts:failures",
}
"""Experiments of seconds, which the long test runs; every module has others."""


@pytest.fixture(scope="module")
def deck_runner():
    with ExperimentRunner(RunLimits(120.0)) as started:  # other tests may use the processors
        yield started


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_card_is_complete(card):
    assert schema_problems(card) == []


def test_schema_checks_find_what_is_missing():
    from dataclasses import replace

    assert schema_problems(PREDICTED, experiments=False) == []
    assert "no source" in schema_problems(replace(PREDICTED, sources=()), experiments=False)
    assert "neither predictions nor claims" in schema_problems(replace(PREDICTED, predictions=()), experiments=False)
    same = replace(PREDICTED, relations=(Relation("Equal.", "size", "==", "size"),))
    assert "a relation compares size with itself" in schema_problems(same, experiments=False)
    assert "every claim has the same answer" not in schema_problems(
        replace(PREDICTED, claims=CLAIMS), experiments=False
    )
    assert any("experiment" in problem for problem in schema_problems(PREDICTED))


def test_ids_are_unique_and_close_ones_are_suggested(tmp_path, monkeypatch):
    import types

    package = tmp_path / "two_decks"
    package.mkdir()
    (package / "__init__.py").write_text('"""Deck."""\n')
    for name in ("a", "b"):
        (package / f"{name}.py").write_text(
            "from tests.practice.cards.fake_cards import PREDICTED\nCARDS = (PREDICTED,)\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    found = types.ModuleType("two_decks")
    found.__path__ = [str(package)]
    with pytest.raises(ConfigError, match=r"two_decks.b has a second card with the id fake-double"):
        collect_cards(found)
    with pytest.raises(ConfigError, match="did you mean fake-double"):
        find_card({"fake-double": PREDICTED}, "fake-duoble")
    assert sorted(card.id for card in teaching_order(CARDS)) == sorted(CARDS)


def check(verified):
    """A card is true here, and each of its claims is false once it is inverted or its number is changed."""
    assert verified.problems == (), f"{verified.card.id}: {verified.problems}"
    card, values = verified.card, verified.run.observation.values
    for relation in card.relations:
        assert relation.holds(values), relation
        assert not relation.inverted().holds(values), relation
        assert not relation_survives_mutation(relation, values), relation
    for relation in card.refuted:
        assert not relation.holds(values), relation
    decided = [claim.relation.holds(values) for claim in card.claims]
    assert not card.claims or set(decided) == {True, False}, f"{card.id}: all claims have the same answer"


def test_a_wrong_card_does_not_pass(runner):
    assert [bool(item.problems) for item in verify_cards([PREDICTED, WRONG], runner)] == [False, True]
    run = next(iter(verify_cards([PREDICTED], runner))).run
    assert find_problems(PREDICTED, run) == ()
    loose = Relation("About twice.", "doubled", "==", 17.0, tolerance=0.1)
    assert not relation_survives_mutation(loose, {"doubled": 16.0})


BY_EXPERIMENT = {
    experiment: [card for card in CARDS.values() if card.experiment.run == experiment]
    for experiment in {card.experiment.run for card in CARDS.values()}
}
"""The cards of each experiment, which runs once for all of them."""


def test_every_module_has_experiments_that_are_not_slow():
    modules = {name.partition(":")[0] for name in BY_EXPERIMENT}
    assert BY_EXPERIMENT.keys() > SLOW_EXPERIMENTS
    assert {name.partition(":")[0] for name in BY_EXPERIMENT.keys() - SLOW_EXPERIMENTS} == modules


@pytest.mark.parametrize("experiment", sorted(BY_EXPERIMENT.keys() - SLOW_EXPERIMENTS))
def test_cards_of_every_quick_experiment_are_true_here(experiment, deck_runner):
    for verified in verify_cards(BY_EXPERIMENT[experiment], deck_runner):
        check(verified)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_card_is_true_here_and_false_when_inverted(deck_runner):
    for verified in verify_cards(list(CARDS.values()), deck_runner):
        check(verified)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_review_day_takes_less_than_ten_minutes_of_machine_time(deck_runner, capsys):
    """The twenty cards that take longest, so that it holds for every day."""
    seconds = sorted((item.run.seconds for item in verify_cards(list(CARDS.values()), deck_runner)), reverse=True)
    day = sum(seconds[:CARDS_PER_DAY])
    with capsys.disabled():
        print(f"\nthe {CARDS_PER_DAY} slowest cards take {day:.0f} s of machine time, of {REVIEW_DAY_SECONDS:.0f}")
    assert day < REVIEW_DAY_SECONDS
