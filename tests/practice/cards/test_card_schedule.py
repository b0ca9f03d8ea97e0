"""Spaced repetition: a function of the reviews and their times, capped per day, and safe with two sessions at once."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from meshwright_practice.cards.grading import Rating
from meshwright_practice.cards.schedule import (
    CardReview,
    CardState,
    format_due,
    load_cards,
    read_states,
    record_review,
    review_queue,
    schedule_reviews,
)
from meshwright_practice.progress import PracticeProgress, load_progress, save_progress, update_progress

from meshwright.errors import ConfigError
from tests.practice.cards.fake_cards import PREDICTED

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
KINDS = ("communication", "numerics", "recovery")
DECK = {f"card-{n:02d}": replace(PREDICTED, id=f"card-{n:02d}", kind=KINDS[n % 3]) for n in range(40)}


def record(path, card_id, time, rating=Rating.GOOD):
    return record_review(path, card_id, CardReview(time, rating, {"size": 8}, {"doubled": 16.0}), pytest.fail)


def queue(path, now, **limits):
    return review_queue(DECK, read_states(DECK, load_progress(path, pytest.fail)), now, **limits)


def test_ratings_order_the_intervals():
    due = [datetime.fromisoformat(schedule_reviews("a", [(NOON, rating)])["due"]) for rating in Rating]
    assert due == sorted(due)
    assert due[0] == NOON + timedelta(minutes=10)
    assert due[2] - NOON >= timedelta(days=1)


def test_the_schedule_is_a_function_of_reviews_and_times(tmp_path):
    times = [NOON + timedelta(days=days) for days in (0, 2, 9, 30)]
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, order in zip(paths, (times, [times[0], times[2], times[1], times[3]]), strict=True):
        for time in order:
            record(path, "card-00", time)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    entry = json.loads(paths[0].read_text())["cards"]["card-00"]
    assert [review["rating"] for review in entry["reviews"]] == [3, 3, 3, 3]
    assert entry["reviews"][0]["knobs"] == {"size": 8}
    assert entry["fsrs"] == schedule_reviews("card-00", [(time, Rating.GOOD) for time in times])


def test_new_cards_are_capped_per_day_and_kinds_take_turns(tmp_path):
    path = tmp_path / "practice.json"
    first = queue(path, NOON)
    assert [card.kind for card in first.new[:3]] == list(KINDS)
    assert (len(first.due), len(first.new)) == (0, 10)
    for number, card in enumerate(first.new):
        record(path, card.id, NOON + timedelta(minutes=number))
    assert queue(path, NOON + timedelta(hours=1)).cards == ()
    assert len(queue(path, NOON + timedelta(days=1)).new) == 10


def test_overdue_cards_fold_into_days_of_twenty(tmp_path):
    path = tmp_path / "practice.json"
    for number, card_id in enumerate(DECK):
        record(path, card_id, NOON + timedelta(minutes=number))
    later = NOON + timedelta(days=60)
    day = queue(path, later)
    assert (len(day.due), len(day.new), day.postponed) == (20, 0, 20)
    for card in day.due[:15]:
        record(path, card.id, later)
    rest = queue(path, later + timedelta(minutes=1))
    assert (len(rest.due), rest.postponed) == (5, 20)
    assert rest.due == day.due[15:]


def test_a_wrong_answer_comes_back_on_the_same_day_beyond_the_cap(tmp_path):
    path = tmp_path / "practice.json"
    card = queue(path, NOON).new[0]
    record(path, card.id, NOON, Rating.AGAIN)
    again = queue(path, NOON + timedelta(minutes=11), new_per_day=1, cards_per_day=1)
    assert [found.id for found in again.cards] == [card.id]
    assert queue(path, NOON + timedelta(minutes=5), new_per_day=1).next_due == NOON + timedelta(minutes=10)


def test_a_day_begins_at_midnight_of_the_time_zone_of_the_clock(tmp_path):
    path, far_west = tmp_path / "practice.json", timezone(timedelta(hours=-9))
    evening = datetime(2026, 5, 4, 23, 30, tzinfo=far_west)
    for card in queue(path, evening).new:
        record(path, card.id, evening.astimezone(UTC))
    assert queue(path, evening + timedelta(minutes=20)).new == ()
    assert len(queue(path, evening + timedelta(minutes=31)).new) == 10


@pytest.mark.parametrize(
    ("later", "text"),
    [({"minutes": 10}, "in 10 min"), ({"hours": 3}, "in 3 h"), ({"days": 12}, "in 12 days on 2026-05-16")],
)
def test_due_times_are_written_for_people(later, text):
    assert format_due(NOON + timedelta(**later), NOON) == text
    assert CardState().describe(NOON) == "new"


def scheduled(due, stability=3.0):
    return {"fsrs": {"due": due, "stability": stability}, "reviews": []}


DAMAGED = [
    3,
    {},
    {"fsrs": {}, "reviews": [{"time": "x", "rating": 9}]},
    {"reviews": []},
    scheduled("0001-01-01T00:00:00+23:00"),
    scheduled("9999-12-31T23:59:59+00:00"),
    scheduled(NOON.isoformat(), 10**400),
    scheduled(NOON.isoformat(), float("nan")),
]


@pytest.mark.parametrize("entry", DAMAGED)
def test_a_damaged_entry_is_named_once_and_kept_and_other_cards_work(tmp_path, entry):
    path, reports = tmp_path / "practice.json", []
    record(path, "card-01", NOON)
    update_progress(path, lambda progress: progress.cards.update({"card-00": entry}), pytest.fail)
    states = read_states(DECK, load_cards(path, reports.append))
    assert (states["card-00"].due, len(states["card-01"].reviews)) == (None, 1)
    assert len(reports) == 1
    assert "card card-00 is damaged" in reports[0]
    assert str(path) in reports[0]
    assert repr(load_cards(path, pytest.fail).damaged) == repr({"cards/card-00/1": entry})


def test_a_review_of_a_damaged_entry_keeps_the_entry(tmp_path):
    path, reports = tmp_path / "practice.json", []
    for entry in (3, 4):
        update_progress(path, lambda progress, value=entry: progress.cards.update(card=value), pytest.fail)
        record_review(path, "card", CardReview(NOON, Rating.GOOD), reports.append)
    assert load_cards(path, pytest.fail).damaged == {"cards/card/1": 3, "cards/card/2": 4}
    assert len(reports) == 2


def test_a_damaged_entry_in_a_folder_that_cannot_be_written_blocks_no_card(tmp_path, monkeypatch):
    path, reports = tmp_path / "practice.json", []
    save_progress(PracticeProgress(cards={"card-00": 3}), path)
    monkeypatch.setattr("meshwright_practice.progress.locked", refuse)
    assert read_states(DECK, load_cards(path, reports.append))["card-00"] == CardState()
    assert "Read-only file system" in reports[0]


def refuse(*_args):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_damaged_file_that_cannot_be_renamed_is_named_with_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "practice.json"
    path.write_text("{")
    for name in ("set_aside", "locked"):
        monkeypatch.setattr(f"meshwright_practice.progress.{name}", refuse)
        with pytest.raises(ConfigError, match=r"is damaged .* cannot be renamed: Read-only file system; try to repair"):
            load_progress(path, pytest.fail)
    assert path.read_text() == "{"


def test_a_file_that_another_process_has_repaired_is_not_set_aside(tmp_path, monkeypatch):
    path = tmp_path / "practice.json"
    path.write_text("{")

    @contextmanager
    def repaired(_path):
        path.write_text('{"format": 1, "labs": {"ring": {}}}')
        yield

    monkeypatch.setattr("meshwright_practice.progress.locked", repaired)
    assert load_progress(path, pytest.fail).labs == {"ring": {}}


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "kept").mkdir()
    path, target = tmp_path / "practice.json", tmp_path / "kept" / "mine.json"
    path.symlink_to(target)
    record(path, "card-00", NOON)
    record(path, "card-01", NOON)
    assert path.is_symlink()
    assert set(load_progress(target, pytest.fail).cards) == {"card-00", "card-01"}
    target.write_text("{")
    load_progress(path, [].append)
    assert path.is_symlink()
    assert (tmp_path / "kept" / "mine.json.damaged-1").read_text() == "{"


def review_many(path, card_ids, offset):
    for number, card_id in enumerate(card_ids):
        record_review(path, card_id, CardReview(NOON + timedelta(seconds=10 * number + offset), Rating.GOOD), print)


def test_two_sessions_at_once_lose_no_review(tmp_path):
    path, ids = tmp_path / "practice.json", ["card-00"] * 8 + ["card-01"] * 8
    context = multiprocessing.get_context("fork")
    sessions = [context.Process(target=review_many, args=(path, ids, offset)) for offset in range(3)]
    for session in sessions:
        session.start()
    for session in sessions:
        session.join(60)
    cards = load_progress(path, pytest.fail).cards
    assert {card: len(entry["reviews"]) for card, entry in cards.items()} == {"card-00": 24, "card-01": 24}


def test_saving_keeps_what_other_processes_saved_since_it_was_loaded(tmp_path):
    path = tmp_path / "practice.json"
    save_progress(PracticeProgress(labs={"ring": {"passed": False}, "old": {}}), path)
    mine = load_progress(path, pytest.fail)
    record(path, "card-00", NOON)
    update_progress(path, lambda progress: progress.labs.update(zero={"passed": True}), pytest.fail)
    mine.labs["ring"] = {"passed": True}
    del mine.labs["old"]
    save_progress(mine, path)
    merged = load_progress(path, pytest.fail)
    assert merged.labs == {"ring": {"passed": True}, "zero": {"passed": True}} == mine.labs
    assert set(merged.cards) == {"card-00"}


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"format": 0}', '{"format": "9"}', '{"format": true, "cards": 1}', '{"format": 1, "cards": []}'],
)
def test_a_damaged_file_is_set_aside_and_never_lost(tmp_path, content):
    path, reports = tmp_path / "practice.json", []
    path.write_text(content)
    record_review(path, "card-00", CardReview(NOON, Rating.GOOD), reports.append)
    assert "practice.json.damaged-1" in reports[0]
    assert path.with_name("practice.json.damaged-1").read_text() == content
    assert set(load_progress(path, pytest.fail).cards) == {"card-00"}


def test_a_file_of_a_newer_version_is_neither_renamed_nor_overwritten(tmp_path):
    path = tmp_path / "practice.json"
    content = '{"format": 2, "cards": {"card-00": {"stability": 3}}}'
    path.write_text(content)
    for use in (
        lambda: load_progress(path, pytest.fail),
        lambda: save_progress(PracticeProgress(labs={"ring": {}}), path),
        lambda: update_progress(path, lambda progress: None, pytest.fail),
    ):
        with pytest.raises(ConfigError, match="was written by a newer version of Meshwright"):
            use()
    assert path.read_text() == content
    assert not [*tmp_path.glob("*.damaged-*")]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsrs", None)
    with pytest.raises(ConfigError, match=r"pip install 'meshwright\[practice\]'"):
        schedule_reviews("a", [(NOON, Rating.GOOD)])
