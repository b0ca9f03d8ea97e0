"""A review session: predict, run, see, explain. What is completed is saved, and a card that is wrong here says so."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from meshwright_practice.cards.answers import shown_claims
from meshwright_practice.cards.card import Knob, Relation
from meshwright_practice.cards.card_text import sides
from meshwright_practice.cards.runner import RunLimits
from meshwright_practice.cards.session import ReviewSession
from meshwright_practice.progress import load_progress, progress_file
from rich.console import Console

from meshwright.base.cli.main import dispatch
from meshwright.errors import ConfigError
from tests.practice.cards.fake_cards import CHOSEN, DECK, DOUBLE, HANGING, PREDICTED, WRONG

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
TRUE = "".join(letter for letter, claim in shown_claims(CHOSEN) if claim.relation.holds({"size": 8, "doubled": 16}))


class Reader:
    """Answers prompts from a list; an exception in the list is raised."""

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        text = self.texts.pop(0)
        if isinstance(text, str):
            return text
        raise text


@pytest.fixture
def session(runner, home):
    def make(*texts, width=100):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        return ReviewSession(runner, progress_file(), console, Reader(*texts), lambda: NOON)

    return make


def shown(session):
    return session.console.file.getvalue()


def saved():
    return load_progress(progress_file(), pytest.fail).cards


def test_a_review_predicts_runs_shows_and_explains_in_this_order(session):
    review = session("many", "2*8", "")
    review.review_all([PREDICTED])
    text = shown(review)
    parts = ["How many bytes", "size = 8", "is not a prediction", "predicted", "16 B", "exact", "Values", "A note"]
    parts += ["✓ Twice the size is sent.", "16 (doubled) = 16", "refuted", "Answer", "Twice the size.", "Notes"]
    parts += ["Common mistake", "Sources", "Next review", "Easy: the card is due in 8 days", "1 review saved"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places), text
    entry = saved()["fake-double"]["reviews"][0]
    assert entry["time"] == NOON.isoformat()
    assert entry["predictions"] == entry["measured"] == {"doubled": 16.0}
    assert (entry["knobs"], entry["error"], entry["rating"]) == ({"size": 8}, 0.0, 4)


def test_knobs_can_be_changed_after_the_grade_without_a_second_review(session):
    review = session("16", "size=9", "size=16", "q")
    review.review_all([PREDICTED, CHOSEN])
    text = shown(review)
    assert "expected one of 8, 16" in text
    assert "· Twice the size is sent.  32 (doubled)" in text
    assert "stated for the default settings" in text
    assert "does not hold" not in text
    assert "IS WRONG" not in text  # relations are stated for the default knobs
    assert set(saved()) == {"fake-double"}
    assert len(saved()["fake-double"]["reviews"]) == 1


def test_claims_are_graded_by_the_choice(session):
    review = session()
    assert review.review(CHOSEN, {"size": 8}, [TRUE]).grade.rating.name == "EASY"
    assert review.review(CHOSEN, {"size": 8}, ["none"]).grade.rating.name == "AGAIN"
    assert "true, and you said false" in shown(review)
    assert [entry["rating"] for entry in saved()["fake-claims"]["reviews"]] == [4, 1]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EOFError()])
def test_ctrl_c_loses_no_completed_review(session, end):
    review = session("16", "", end)
    assert len(review.review_all([PREDICTED, CHOSEN])) == 1
    assert set(saved()) == {"fake-double"}


def test_a_card_that_is_wrong_on_this_machine_is_said_loudly_and_not_recorded(session):
    review = session()
    reviewed = review.review(WRONG, {"size": 8}, ["16"])
    assert reviewed.grade is None
    assert "THE CARD fake-wrong IS WRONG ON THIS MACHINE" in shown(review)
    assert "✗ does not hold: Twice the size is sent." in shown(review)
    assert "The review is not recorded." in shown(review)
    assert reviewed.to_json()["problems"] == ["does not hold: Twice the size is sent."]
    assert saved() == {}


def test_a_review_with_other_knobs_is_graded_and_not_recorded(session):
    review = session()
    reviewed = review.review(PREDICTED, {"size": 16}, ["32"])
    assert (reviewed.grade.rating.name, reviewed.state, reviewed.is_error) == ("EASY", None, False)
    assert "not recorded: relations of this card are stated for the default settings" in shown(review)
    decided = replace(PREDICTED, relations=PREDICTED.refuted)
    assert decided.can_grade({"size": 16})
    assert not PREDICTED.can_grade({"size": 16})
    assert saved() == {}


def test_a_disk_that_cannot_be_written_costs_the_record_and_not_the_explanation(session, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("meshwright_practice.progress.write_json", refuse)
    review = session("16", "q")
    reviewed = review.review_all([PREDICTED])[0]
    text = shown(review)
    reason = f"not recorded: {progress_file()}: No space left on device"
    joined = text.replace("\n", "")
    assert (
        joined.index("exact") < joined.index("Common mistake") < joined.index(reason) < joined.index("0 reviews saved")
    )
    assert (reviewed.to_json()["recorded"], reviewed.to_json()["rating"]) == (False, "easy")


def test_the_question_names_the_ranks_that_the_knobs_give():
    ring = replace(DOUBLE, ranks=4, knobs=(Knob("ranks", (4, 2), "ranks"),))
    assert (ring.ranks_with({"ranks": 2}), ring.ranks_with({"ranks": 4})) == (2, 4)
    computed = replace(ring, ranks=1)
    assert computed.ranks_with({"ranks": 2}) == 1
    assert DOUBLE.ranks_with({"size": 8}) == 1


def test_an_experiment_that_fails_is_not_a_review(session, runner, monkeypatch):
    monkeypatch.setattr(runner, "limits", RunLimits(0.5))
    review = session()
    assert review.review(HANGING, {}, ["16"]).grade is None
    assert "The experiment has no result: it had not ended after 0.5 s" in shown(review)
    assert saved() == {}


def test_ctrl_c_while_an_experiment_runs_ends_it_and_the_server_starts_again(session, runner):
    review = session()
    runner.start()
    process, folder = runner._process, runner._folder.path

    def interrupt(seconds, used):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(HANGING.experiment, {}, interrupt)
    assert process.poll() is not None
    assert not folder.exists()
    runner.start()
    runner._process.kill()  # whatever ends the server, the next experiment has a new one
    runner._process.wait()
    assert review.review(PREDICTED, {"size": 8}, ["16"]).grade is not None


def test_a_tolerance_widens_or_narrows_a_relation_in_words():
    values = {"sent": 101.0, "size": 50.0}
    assert sides(Relation("", "sent", "==", 100.0, 0.02), values) == "101 (sent) = 100 within 2%"
    assert sides(Relation("", "sent", ">", "size", 1.0), values) == "101 (sent) > 50 (size) by more than 100%"
    assert sides(Relation("", "sent", "<", "size"), values) == "101 (sent) ≥ 50 (size)"


@pytest.fixture
def command(runner, monkeypatch, capsys, home):
    """Runs `meshwright practice cards` on the fake deck, with the server of the tests."""

    class Shared:
        def __init__(self, limits):
            runner.limits = limits

        def __enter__(self):
            return runner

        def __exit__(self, *error):
            runner.limits = RunLimits(60.0)

    monkeypatch.setattr("meshwright_practice.cards.registry.all_cards", lambda: DECK)
    monkeypatch.setattr("meshwright_practice.cards.runner.ExperimentRunner", Shared)

    def run(*args):
        code = 0
        try:
            dispatch(["practice", "cards", *args])
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return run


def test_without_a_terminal_the_queue_is_printed(command):
    code, text = command()
    assert code == 0
    assert "0 due, 4 new" in text
    assert "fake-claims" in text
    assert "--card ID --answer VALUE" in text
    queue = json.loads(command("--json")[1])
    assert queue["new"][0] == "fake-double"


def test_list_groups_cards_by_kind_with_their_state(command):
    command("--card", "fake-double", "--answer", "16")
    code, text = command("--list")
    assert code == 0
    assert text.index("communication (3)") < text.index("fake-double") < text.index("judgement (1)")
    assert "due in 8 days" in text
    rows = json.loads(command("--list", "--json")[1])["cards"]
    assert [row["reviews"] for row in rows] == [1, 0, 0, 0]


def test_show_prints_a_card_without_running_it(command):
    text = command("--show", "fake-double")[1]
    for part in (
        "How many bytes",
        "Predict",
        "Bytes that are sent [bytes]",
        "size = 8 | 16",
        "Common mistake",
        "own run",
    ):
        assert part in text
    assert json.loads(command("--show", "fake-claims", "--json")[1])["card"]["id"] == "fake-claims"


def test_run_sets_knobs_and_grades_nothing(command):
    code, text = command("--run", "fake-double", "--set", "size=16", "--json")
    result = json.loads(text)
    assert (code, result["values"]["doubled"], result["knobs"]) == (0, 32.0, {"size": 16})
    assert result["picture"]["type"] == "bars"
    assert saved() == {}
    assert "16 (doubled)" in command("--run", "fake-double")[1]


def test_card_with_an_answer_is_a_review(command):
    code, text = command("--card", "fake-double", "--answer", "20", "--json")
    result = json.loads(text)
    assert (code, result["rating"], result["error"], result["recorded"]) == (0, "hard", 0.25, True)
    assert command("--card", "fake-wrong", "--answer", "16")[0] == 1
    progress_file().unlink()
    progress_file().with_name("practice.json.lock").unlink()
    progress_file().with_name("practice.json.lock").mkdir()  # the lock cannot be taken, whoever runs the test
    code, text = command("--card", "fake-double", "--answer", "20", "--json")
    assert (code, json.loads(text)["recorded"], json.loads(text)["rating"]) == (2, False, "hard")


def test_verify_checks_every_relation_and_fails_if_one_is_broken(command):
    code, text = command("--verify", "fake-double", "fake-claims")
    assert code == 0
    assert "2 cards, 1 experiments, 4 relations: 0 cards are wrong" in text
    code, text = command("--verify", "--seconds", "0.5")
    assert code == 1
    assert "does not hold: Twice the size is sent." in text
    assert "it had not ended after 0.5 s" in text
    assert "2 cards are wrong" in text
    result = json.loads(command("--verify", "fake-wrong", "--json")[1])
    assert (result["wrong"], result["cards"][0]["problems"]) == (1, ["does not hold: Twice the size is sent."])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--show", "fake-dubble"], "did you mean fake-double"),
        (["--card", "fake-double"], "expected --answer VALUE"),
        (["--answer", "1"], "expected --card ID --answer VALUE"),
        (["--set", "size=8"], "expected --run ID"),
        (["--run", "fake-double", "--set", "sice=8"], "expected NAME=VALUE with one of size"),
        (["--list", "--show", "x"], "cannot be combined"),
        (["--card", "fake-double", "--answer", "much"], "expected a number or a formula"),
        (["--card", "fake-double", "--answer", "3 steps"], "the unit of this prediction is bytes"),
        (["--verify", "--seconds", "nan"], "--seconds nan is not a limit"),
        (["--verify", "--seconds=-1"], "--seconds -1 is not a limit"),
        (["--verify", "--memory", "inf"], "--memory inf is not a limit"),
        (["--verify", "--memory", "0"], "--memory 0 is not a limit"),
    ],
)
def test_mistakes_are_one_line_with_what_is_expected(command, args, message):
    with pytest.raises(ConfigError, match=message):
        command(*args)


def test_list_and_show_do_not_import_torch(home):
    import subprocess

    code = (
        "import sys; from meshwright.base.cli import main\n"
        "main(['practice', 'cards', '--list']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
