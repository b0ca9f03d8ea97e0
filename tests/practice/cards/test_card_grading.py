"""The error of a prediction sets the rating, answers are read with prefixes and formulas, and nothing else is run."""

from __future__ import annotations

import pytest
from meshwright_practice.cards.answers import parse_choice, parse_number, shown_claims
from meshwright_practice.cards.grading import Rating, grade, rate_choice, rate_prediction
from meshwright_practice.cards.reviews import take_answers

from meshwright.errors import ConfigError
from tests.practice.cards.fake_cards import CHOSEN, PREDICTED

VALUES = {"size": 8.0, "doubled": 16.0}


@pytest.mark.parametrize(
    ("predicted", "measured", "rating"),
    [
        (100.0, 100.0, Rating.EASY),
        (102.0, 100.0, Rating.EASY),
        (102.1, 100.0, Rating.GOOD),
        (85.0, 100.0, Rating.GOOD),
        (84.9, 100.0, Rating.HARD),
        (200.0, 100.0, Rating.HARD),
        (50.0, 100.0, Rating.HARD),
        (201.0, 100.0, Rating.AGAIN),
        (49.0, 100.0, Rating.AGAIN),
        (-100.0, 100.0, Rating.AGAIN),
        (-90.0, -100.0, Rating.GOOD),
        (0.0, 0.0, Rating.EASY),
        (1e-9, 0.0, Rating.AGAIN),
        (0.0, 5.0, Rating.AGAIN),
    ],
)
def test_the_relative_error_sets_the_rating(predicted, measured, rating):
    assert rate_prediction(predicted, measured, 0.02) is rating


def test_a_wide_tolerance_of_a_prediction_counts_as_exact():
    assert rate_prediction(140.0, 100.0, 0.5) is Rating.EASY


@pytest.mark.parametrize(
    ("right", "claims", "rating"),
    [(4, 4, Rating.EASY), (2, 2, Rating.GOOD), (3, 4, Rating.HARD), (2, 3, Rating.HARD), (2, 4, Rating.AGAIN)],
)
def test_the_share_of_right_claims_sets_the_rating(right, claims, rating):
    assert rate_choice(right, claims) is rating


def test_the_worst_of_several_answers_counts():
    from dataclasses import replace

    both = replace(PREDICTED, claims=CHOSEN.claims, predictions=PREDICTED.predictions * 2)
    true = {letter for letter, claim in shown_claims(both) if claim.relation.holds(VALUES)}
    assert grade(both, [16.0, 16.0], true, VALUES).rating is Rating.EASY
    assert grade(both, [16.0, 20.0], true, VALUES).rating is Rating.HARD
    assert grade(both, [16.0, 16.0], set(), VALUES).rating is Rating.AGAIN
    assert grade(both, [16.0, 20.0], true, VALUES).error == 0.25


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12.0),
        ("-3.5", -3.5),
        ("1e6", 1e6),
        ("12,288", 12288.0),
        ("1_000", 1000.0),
        ("12.5M", 12.5e6),
        ("3/4", 0.75),
        ("2*(4-1)/4", 1.5),
        ("40 %", 0.4),
        ("1,234,567.5", 1234567.5),
    ],
)
def test_a_prediction_is_a_number_or_a_formula(text, value):
    assert parse_number(text) == pytest.approx(value, rel=1e-12)


def test_a_unit_that_follows_is_converted_into_the_unit_of_the_prediction():
    assert parse_number("1.5 GiB", "B") == 1.5 * 2**30
    assert parse_number("3 kB", "bytes") == 3000.0
    assert parse_number("2**10 B", "B") == 1024.0
    assert parse_number("12.5M", "GB") == parse_number("12.5 MB", "GB") == 0.0125
    assert parse_number("2 ms", "s") == 0.002
    assert parse_number("3 steps", "steps") == parse_number("3 step", "steps") == parse_number("3", "steps") == 3.0
    assert parse_number("3k tokens", "tokens") == parse_number("3k", "tokens") == 3000.0
    assert parse_number("1.5 D", "D") == parse_number("2*(4-1)/4D", "D") == 1.5
    assert parse_number("1.5x", "times") == 1.5
    assert parse_number("50 %", "of DDP's bytes") == parse_number("0.5 of DDP's bytes", "of DDP's bytes") == 0.5
    assert parse_number("0.5 of the norm at layer 20", "of the norm at layer 20") == 0.5
    assert parse_number("4 MiB", "MiB") == parse_number("4", "MiB") == 4.0
    assert parse_number("0.5 GiB", "MiB") == 512.0
    assert parse_number("40 %", "%") == 40.0
    assert parse_number("2 ms", "ms") == 2.0
    assert parse_number("2 ms", "microseconds") == pytest.approx(2000.0)
    assert parse_number("40 %", "percent") == 40.0
    assert parse_number("3 micro-batches", "micro-batches") == 3.0


@pytest.mark.parametrize(
    ("text", "unit", "named"),
    [
        ("1 GiB", "D", "is D"),
        ("3 bananas", "steps", "is steps"),
        ("3 steps", "", "has no unit"),
        ("2 ms", "GB", "is GB"),
        ("2M", "microseconds", "is microseconds"),
        ("1 Gb", "GB", "is GB"),
        ("5 %", "samples", "is samples"),
    ],
)
def test_a_unit_that_does_not_fit_is_refused(text, unit, named):
    with pytest.raises(
        ConfigError, match=f"this prediction {named}" if not unit else f"unit of this prediction {named}"
    ):
        parse_number(text, unit)


@pytest.mark.parametrize("text", ["1,5", "0,125", "12,34", "1,2345", "1234,567", "1,000,00", "0.5,000"])
def test_a_comma_that_does_not_separate_thousands_is_refused(text):
    with pytest.raises(ConfigError, match="comma that does not separate thousands"):
        parse_number(text)


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "many",
            "__import__('os')",
            "1/0",
            "9**9**9",
            "9.0**999999",
            "(1)(2)",
            "True",
            "[1]",
            "1" * 300,
            "nan",
            "1;2",
        ],
        *["(" * 150 + "1" + ")" * 40, "-" * 190 + "1+", "x=1", "1 if 1 else 2", "'a'*9"],
    ],
)
def test_anything_else_is_refused_without_being_run(text):
    with pytest.raises(ConfigError, match="expected a number or a formula"):
        parse_number(text)


def test_claims_are_shown_in_an_order_that_depends_on_the_id():
    from dataclasses import replace

    orders = {tuple(claim.text for _, claim in shown_claims(replace(CHOSEN, id=f"card-{n}"))) for n in range(20)}
    assert len(orders) > 5
    assert shown_claims(CHOSEN) == shown_claims(CHOSEN)


def test_a_choice_is_letters_or_none():
    assert (
        parse_choice(CHOSEN, ["a", "c"]) == parse_choice(CHOSEN, ["ac"]) == parse_choice(CHOSEN, ["a, c"]) == {"a", "c"}
    )
    assert parse_choice(CHOSEN, ["none"]) == set()
    for text in ("", "e", "a1"):
        with pytest.raises(ConfigError, match="expected the letters"):
            parse_choice(CHOSEN, [text])


def test_answers_on_the_command_line_must_match_the_card():
    assert take_answers(PREDICTED, ["16"]).predicted == (16.0,)
    for texts in ([], ["1", "2"]):
        with pytest.raises(ConfigError, match="expected 1 number"):
            take_answers(PREDICTED, texts)
