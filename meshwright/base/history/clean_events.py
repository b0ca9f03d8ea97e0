"""Takes events from untrusted records: every field has its type, and texts are short. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from meshwright.base.records.events import Event
from meshwright.base.records.incidents import Incident
from meshwright.base.records.untrusted_records import bounded_object, finite_number, unix_time

MAX_TEXT = 4096
"""Characters of a text that are kept."""
MAX_EVENTS = 2048
"""Events of one kind that are kept: the newest."""
MAX_CELLS = 1 << 16
"""Cells of a table of expert loads that are kept."""


class EventList(list[Event]):
    """A list of the newest events of one kind."""

    total = 0
    """how many events there were, with the forgotten ones"""

    def keep(self, event: Event | None) -> None:
        """Appends an event, and forgets the oldest ones if there are too many."""
        if event is not None:
            self.total += 1
            self.append(event)
            if len(self) > 2 * MAX_EVENTS:
                del self[:MAX_EVENTS]


class InvalidField(Exception):
    """A record without a field that its readers need."""


def integer(value: Any) -> int:
    if type(value) is not int or not -1 <= value < 1 << 53:
        raise InvalidField
    return value


def text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def texts(value: Any) -> list[str]:
    return [item[:MAX_TEXT] for item in value[:64] if isinstance(item, str)] if isinstance(value, list) else []


def numbers(value: Any) -> dict[str, float | None]:
    return {name: finite_number(item) for name, item in bounded_object(value).items()}


def matrix(value: Any) -> list[list[float]]:
    """Rows of finite numbers of equal length."""
    rows = value if isinstance(value, list) and value and all(isinstance(row, list) for row in value) else []
    if sum(map(len, rows)) > MAX_CELLS or len({len(row) for row in rows}) > 1:
        raise InvalidField
    return [[vector_entry(cell) for cell in row] for row in rows]


def vector(value: Any) -> list[float]:
    return [vector_entry(cell) for cell in value[:MAX_CELLS]] if isinstance(value, list) else []


def vector_entry(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InvalidField
    return value


def damage(value: Any) -> list[Event]:
    rows = [bounded_object(row) for row in value[:16]] if isinstance(value, list) else []
    return [{key: text(str(row.get(key, ""))) for key in ("file", "chunk", "expected", "found")} for row in rows]


FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "restored": {"step": integer, "checkpoint": text, "seconds": finite_number, "changes": texts, "hosts": texts},
    "extended": {"step": integer, "steps_before": integer, "steps": integer},
    "code_changed": {"step": integer, "changes": texts},
    "choices": {"summary": text},
    "unfused_loss": {"reason": text},
    "damaged": {"checkpoint": text, "damage": damage},
    "experts": {"step": integer, "loads": matrix, "dropped": vector},
    "eval": {"step": integer, "loss": finite_number, "tokens": finite_number, "metrics": numbers},
    "checkpoint": {
        "step": integer,
        "bytes": finite_number,
        "stall_seconds": finite_number,
        "seconds": finite_number,
        "retention_error": text,
    },
    "save_failed": {"step": integer, "message": text},
    "bad_sample": {"step": integer, "sample": integer, "source": text, "index": integer, "reason": text},
    "nonfinite": {"step": integer, "loss": finite_number, "module": text},
    "callback_failed": {"step": integer, "callback": text, "hook": text, "message": text},
    "end": {"steps": integer, "loss": finite_number, "stopped": text, "parameters_digest": text, "outside": numbers},
    "straggler": {"step": integer, "phase": text, "factor": finite_number, "seconds": finite_number, "message": text},
    "hang": {"message": text},
    "attempt_start": {"restart": integer, "command_started": unix_time},
    "attempt_end": {},
    "command_end": {},
    "events_lost": {"count": integer, "message": text},
    "rollout_problem": {"message": text},
}
"""kind -> the fields that are kept besides kind, attempt, rank and time"""


def clean_event(event: Event) -> Event | None:
    """The event with the fields of its kind; None if a number that its readers need is missing."""
    try:
        cleaned = {"kind": event["kind"], "attempt": integer(event.get("attempt")), "rank": integer(event.get("rank"))}
        cleaned["time"] = unix_time(event.get("time"))
        return cleaned | {name: convert(event.get(name)) for name, convert in FIELDS[event["kind"]].items()}
    except InvalidField:
        return None


OUTCOMES = ("complete", "stopped", "failed", "hang", "lost")


def clean_incident(value: Any, attempt: int) -> Incident | None:
    """The incident in a JSON value; None if it has no outcome."""
    values = bounded_object(value)
    if values.get("outcome") not in OUTCOMES:
        return None
    counts = {
        name: value for name in ("rank", "step", "exit_code", "checkpoint_step") if is_index(value := values.get(name))
    }
    samples = values.get("samples")
    rows = values.get("ranks")
    return Incident(
        attempt,
        values["outcome"],
        counts.get("rank"),
        counts.get("step"),
        phase=text(values.get("phase"))[:64],
        exit_code=counts.get("exit_code", 1),
        error_type=text(values.get("error_type"))[:256],
        message=text(values.get("message")),
        log_tail=texts(values.get("log_tail")),
        stack=values["stack"][: 1 << 16] if isinstance(values.get("stack"), str) else "",
        ranks=[
            {"rank": row.get("rank"), "location": text(row.get("location")), "collectives": row.get("collectives")}
            for row in map(bounded_object, rows[:1024] if isinstance(rows, list) else ())
            if is_index(row.get("rank")) and is_index(row.get("collectives"))
        ],
        samples=[sample for sample in samples[:4096] if is_index(sample)] if isinstance(samples, list) else [],
        checkpoint_step=counts.get("checkpoint_step", -1),
        verdict=text(values.get("verdict"))[:64],
        recommendation=text(values.get("recommendation")),
    )


def is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53
