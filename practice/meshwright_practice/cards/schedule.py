"""When a card is due: FSRS over the reviews of the card, and the queue of a day. Torch-free.

The schedule is a function of the reviews and their times: nothing is random, and the state of a card follows from its
reviews alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from meshwright.base.io import printable
from meshwright.errors import ConfigError
from meshwright_practice.cards.card import Card
from meshwright_practice.cards.grading import Grade, Rating
from meshwright_practice.cards.registry import teaching_order
from meshwright_practice.progress import PracticeProgress, load_progress, update_progress

Clock = Callable[[], datetime]
NEW_PER_DAY = 10
CARDS_PER_DAY = 20
LEARNING_STEPS = (timedelta(minutes=10),)
"""A card that was answered wrongly comes back in the same session; one that was right once waits for days."""
YEARS = range(1970, 3000)
"""Years that a time in the progress file may have: dates near the ends of the calendar have no time in some zones."""


def local_clock() -> datetime:
    """The time with the time zone of this machine, in which a day begins and ends."""
    return datetime.now().astimezone()


@dataclass(frozen=True)
class CardReview:
    """One answer to a card. `predictions` and `measured` are keyed by the name of the value; `claims` by the text."""

    time: datetime
    rating: Rating
    knobs: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    claims: Mapping[str, bool] = field(default_factory=dict)
    error: float | None = None

    @classmethod
    def of(cls, graded: Grade, knobs: Mapping[str, Any], time: datetime) -> CardReview:
        return cls(
            time.astimezone(UTC),
            graded.rating,
            dict(knobs),
            {item.prediction.value: item.predicted for item in graded.predictions},
            {item.prediction.value: item.measured for item in graded.predictions},
            {item.text: item.chosen for item in graded.claims},
            graded.error,
        )

    def to_json(self) -> dict[str, Any]:
        error = None if self.error is None or self.error == float("inf") else self.error
        return asdict(self) | {"time": self.time.isoformat(), "rating": int(self.rating), "error": error}


@dataclass(frozen=True)
class CardState:
    """What is known about a card: its reviews, and when it is due; one without a review is new."""

    reviews: tuple[tuple[datetime, Rating], ...] = ()
    due: datetime | None = None
    stability_days: float | None = None

    def describe(self, now: datetime) -> str:
        if self.due is None:
            return "new"
        return "due" if self.due <= now else f"due {format_due(self.due, now)}"


def format_due(due: datetime, now: datetime) -> str:
    """A due time as people say it: "in 10 min", "in 3 h", "in 12 days on 2027-01-31"."""
    seconds = max(0.0, (due - now).total_seconds())
    if seconds < 90 * 60:
        return f"in {max(1, round(seconds / 60))} min"
    if seconds < 24 * 3600:
        return f"in {round(seconds / 3600)} h"
    days = round(seconds / 86400)
    return f"in {days} day{'' if days == 1 else 's'} on {due.astimezone(now.tzinfo):%Y-%m-%d}"


def read_state(entry: Any, card_id: str) -> CardState:
    """Reads the entry of a card in the progress file, which is untrusted."""
    if entry is None:
        return CardState()
    try:
        reviews = tuple((parse_time(review["time"]), Rating(review["rating"])) for review in entry["reviews"])
        stability = None if entry["fsrs"]["stability"] is None else float(entry["fsrs"]["stability"])
        if stability is not None and not (math.isfinite(stability) and stability >= 0):
            raise ValueError
        return CardState(reviews, parse_time(entry["fsrs"]["due"]), stability)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"the progress of the card {card_id} is damaged", "try to remove its entry from practice.json"
        ) from None


def load_cards(path: Path, report: Callable[[str], None]) -> PracticeProgress:
    """Reads the progress for `read_states`. Damaged entries of cards move to the section `damaged` of the file, and
    `report` says so; these cards are new again, and all others keep their reviews.
    """
    progress = load_progress(path, report)
    if not damaged_cards(progress):
        return progress
    try:
        return update_progress(path, lambda current: move_damaged(current, path, report), report)
    except OSError as error:
        report(f"{path} cannot be written: {error.strerror}")
        move_damaged(progress, path, report)
        return progress


def damaged_cards(progress: PracticeProgress) -> list[str]:
    """The cards whose entries cannot be read."""

    def is_damaged(card_id: str) -> bool:
        try:
            read_state(progress.cards[card_id], card_id)
        except ConfigError:
            return True
        return False

    return [card_id for card_id in progress.cards if is_damaged(card_id)]


def move_damaged(progress: PracticeProgress, path: Path, report: Callable[[str], None]) -> None:
    """Moves damaged entries of cards into the section `damaged`, under a key that is free."""
    found = damaged_cards(progress)
    for card_id in found:
        number = 1
        while (key := f"cards/{card_id}/{number}") in progress.damaged:
            number += 1
        progress.damaged[key] = progress.cards.pop(card_id)
    if found:
        more = f" and of {len(found) - 1} more" if len(found) > 1 else ""
        name = printable(found[0][:80])
        report(f"{path}: the progress of the card {name}{more} is damaged; it is kept under damaged in this file")


def parse_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None or time.year not in YEARS:
        raise ValueError
    return time.astimezone(UTC)


def schedule_reviews(card_id: str, reviews: Sequence[tuple[datetime, Rating]]) -> dict[str, Any]:
    """The FSRS card, as JSON, after reviews in the order of their times."""
    fsrs = import_fsrs()
    scheduler = fsrs.Scheduler(learning_steps=LEARNING_STEPS, relearning_steps=LEARNING_STEPS, enable_fuzzing=False)
    ordered = sorted(reviews)
    state = fsrs.Card(card_id=zlib.crc32(card_id.encode()), due=ordered[0][0])
    for time, rating in ordered:
        state, _ = scheduler.review_card(state, fsrs.Rating(int(rating)), time)
    return dict(state.to_dict())


def import_fsrs() -> Any:
    try:
        import fsrs
    except ImportError:
        raise ConfigError(
            "reviews are scheduled by the package fsrs, which is not installed",
            "try pip install 'meshwright[practice]'",
        ) from None
    return fsrs


def record_review(path: Path, card_id: str, review: CardReview, report: Callable[[str], None]) -> CardState:
    """Adds a review to the progress file and schedules the card again; other processes may do so at the same time."""

    def add(progress: PracticeProgress) -> None:
        move_damaged(progress, path, report)
        before = read_state(progress.cards.get(card_id), card_id).reviews
        entries = [*(progress.cards[card_id]["reviews"] if before else ()), review.to_json()]
        entries.sort(key=lambda entry: parse_time(entry["time"]))
        state = schedule_reviews(card_id, [*before, (review.time, review.rating)])
        progress.cards[card_id] = {"fsrs": state, "reviews": entries}

    progress = update_progress(path, add, report)
    return read_state(progress.cards[card_id], card_id)


@dataclass(frozen=True)
class ReviewQueue:
    """The cards of a day that are left: those that are due, earliest first, and then new ones."""

    due: tuple[Card, ...]
    new: tuple[Card, ...]
    postponed: int
    """cards that are due but beyond the limit of a day; they stay due"""
    next_due: datetime | None
    """when the next card of those that are not due becomes due"""

    @property
    def cards(self) -> tuple[Card, ...]:
        return self.due + self.new


def read_states(cards: Mapping[str, Card], progress: PracticeProgress) -> dict[str, CardState]:
    return {card_id: read_state(progress.cards.get(card_id), card_id) for card_id in cards}


def review_queue(
    cards: Mapping[str, Card],
    states: Mapping[str, CardState],
    now: datetime,
    new_per_day: int = NEW_PER_DAY,
    cards_per_day: int = CARDS_PER_DAY,
) -> ReviewQueue:
    """The queue at the time `now`. Cards that were reviewed today already count, unless they are due again."""

    def days(card_id: str) -> list[date]:
        return [time.astimezone(now.tzinfo).date() for time, _ in states[card_id].reviews]

    today = now.date()
    seen_today = {card_id for card_id in cards if today in days(card_id)}
    new_today = sum(days(card_id)[0] == today for card_id in seen_today)
    due_times = {card_id: time for card_id in cards if (time := states[card_id].due) is not None}
    due = sorted((time, card_id) for card_id, time in due_times.items() if time <= now)
    left = max(0, cards_per_day - len(seen_today))
    again = [cards[card_id] for _, card_id in due if card_id in seen_today]
    waiting = [cards[card_id] for _, card_id in due if card_id not in seen_today]
    chosen = again + waiting[:left]
    unseen = [card for card in teaching_order(cards) if states[card.id].due is None]
    fresh = unseen[: min(max(0, new_per_day - new_today), left - len(waiting[:left]))]
    later = [time for time in due_times.values() if time > now]
    return ReviewQueue(tuple(chosen), tuple(fresh), len(waiting[left:]), min(later, default=None))
