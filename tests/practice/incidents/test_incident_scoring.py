"""Answers are parsed, and scored for truth, time, hints and evidence that the product printed."""

from __future__ import annotations

import pytest
from meshwright_practice.incidents.answer import IncidentAnswer, ask_answer, parse_answer
from meshwright_practice.incidents.catalogue import CLASSES, FIXES
from meshwright_practice.incidents.evidence import PrintedLine
from meshwright_practice.incidents.incident import draw_incident
from meshwright_practice.incidents.scoring import score_answer

from meshwright.errors import ConfigError

INCIDENT = draw_incident(1, CLASSES, "straggler", 40)
RANK = INCIDENT.arrangement.rank
STEP = INCIDENT.values["step"]
LINES = [
    PrintedLine("diagnose", f"rank {RANK} is slower than the other ranks in every step, by 103 ms in fetch"),
    PrintedLine("diagnose", f"96.8 ms  local seconds in fetch, rank {RANK} (the median of the other ranks: 1.47 ms)"),
    PrintedLine("diagnose", "35%  exposed communication per step"),
]
RIGHT = IncidentAnswer("straggler", RANK, (STEP, STEP), "replace-host", "96.8 ms")


def score(seconds=0.0, hints=0, **changes):
    return score_answer(IncidentAnswer(**(vars(RIGHT) | changes)), INCIDENT, None, LINES, seconds, hints)


def evidence_points(quotation):
    return score(evidence=quotation).fields[-1].points


def test_right_answer_has_all_points():
    assert score().total == 100


def test_time_beyond_par_and_hints_cost_points():
    par = INCIDENT.kind.par
    assert score(seconds=par).total == 100
    assert score(seconds=1.5 * par).total == 95
    assert score(seconds=100 * par).total == 80
    assert score(seconds=-5.0).total == 100
    assert score(hints=2).total == 80
    assert score_answer(IncidentAnswer(), INCIDENT, None, LINES, 1e9, 3).total == 0


@pytest.mark.parametrize(
    ("quotation", "points"),
    [
        ("96.8 ms", 15),
        ("diagnose: 103 ms in fetch", 15),
        ("101 ms", 15),  # a live run changes between two looks
        ("Slower than the  other RANKS", 15),
        ("exposed communication per step", 5),
        ("35%", 5),
        ("5 ms", 0),
        ("ms", 0),
        ("4", 0),
        ("the network is slow", 0),
    ],
)
def test_evidence_must_be_what_a_command_printed(quotation, points):
    assert evidence_points(quotation) == points


@pytest.mark.parametrize(
    ("steps", "points"),
    [((STEP - 1, STEP + 1), 15), ((0, 10_000), 0), ((STEP + 30, STEP + 31), 0), ("none", 0), (None, 0)],
)
def test_step_must_be_near_and_not_everything(steps, points):
    assert score(steps=steps).fields[2].points == points


def test_fault_without_a_step_is_answered_with_none():
    bubble = draw_incident(1, CLASSES, "bubble", 40)
    answers = [IncidentAnswer("bubble", "none", steps, "more-micro-batches") for steps in ("none", (3, 3))]
    assert [score_answer(one, bubble, None, [], 0.0, 0).truth for one in answers] == [85, 70]


def test_answer_is_parsed_from_words():
    words = ["class=straggler", "rank=1", "step=10-14", "fix=replace-host", "evidence=a = b"]
    assert parse_answer(words) == IncidentAnswer("straggler", 1, (10, 14), "replace-host", "a = b")
    assert parse_answer(["class=2", "rank=all", "step=none"]) == IncidentAnswer("data-bound", "none", "none")
    assert parse_answer([]) == IncidentAnswer()


@pytest.mark.parametrize(
    "word",
    [
        "straggler",
        "class=flood",
        "rank=-1",
        "rank=x",
        "step=9-3",
        "step=a",
        "fix=0",
        "fix=99",
        "colour=red",
        "class=" + "9" * 5000,
    ],
)
def test_invalid_word_is_refused(word):
    with pytest.raises(ConfigError):
        parse_answer([word])


def test_field_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        parse_answer(["rank=1", "rank=2"])


def test_answer_is_asked_for_on_a_terminal():
    replies = iter(["flood", "straggler", "1", "12", "1", "96.8 ms"])
    shown = []
    answer = ask_answer(lambda _question: next(replies), shown.append)
    assert answer == IncidentAnswer("straggler", 1, (12, 12), next(iter(FIXES)), "96.8 ms")
    text = "\n".join(shown)
    assert all(kind.meaning in text for kind in CLASSES.values())
    assert "flood" in text
