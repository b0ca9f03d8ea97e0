"""Takes numbers, counts and tables from untrusted records; other types and sizes count as missing. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import Any

from meshwright.base.records.events import Event

MAX_TABLE_ROWS = 256
"""Rows of a table, and entries of an object, that are read."""
MAX_NUMBER = 1 << 62
"""Larger numbers are treated as missing."""
MAX_TIME = 4e9
"""The largest time in Unix seconds; its nanoseconds fit 64 bits."""
WARMUP_STEPS = 2
"""The first steps of an attempt, which are slower because of one-time work, and are not timed."""


@dataclass(frozen=True)
class RecordedCounters:
    """The counters of one step on one rank."""

    attempt: int
    step: int
    communication: list[tuple[str, str, int, int]]
    """(axis, collective, message bytes, wire bytes)"""
    at_peak: dict[str, int]
    peak: dict[str, int]
    peak_total: int


def parse_event(line: bytes) -> Event | None:
    """Returns a line as a JSON object, or None."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def finite_number(value: Any) -> float | None:
    """Returns a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_NUMBER:
        return None
    return float(value) if isfinite(value) else None


def unix_time(value: Any) -> float | None:
    """Returns a time in Unix seconds, between 1970 and 2096, or None."""
    number = finite_number(value)
    return number if number is not None and 0 <= number < MAX_TIME else None


def natural_number(value: Any) -> int | None:
    """Returns a non-negative integer, or None."""
    return value if type(value) is int and 0 <= value < MAX_NUMBER else None


def bounded_object(value: Any) -> dict[str, Any]:
    """Returns a JSON object of at most MAX_TABLE_ROWS entries with short keys, or an empty one."""
    rows = value.items() if isinstance(value, dict) else ()
    return {key: item for key, item in rows if len(key) <= 64} if len(rows) <= MAX_TABLE_ROWS else {}


def parse_counters(event: Event) -> RecordedCounters | None:
    """Returns the counters of an event, or None for an event that does not have them."""
    memory, rows = bounded_object(event.get("memory")), event.get("communication")
    step, total = natural_number(event.get("step")), natural_number(memory.get("peak_total"))
    if step is None or total is None or not isinstance(rows, list) or len(rows) > MAX_TABLE_ROWS:
        return None
    communication = [parsed for row in rows if (parsed := parse_communication_row(row)) is not None]
    attempt = natural_number(event.get("attempt")) or 0
    at_peak, peak = byte_counts(memory.get("at_peak")), byte_counts(memory.get("peak"))
    return RecordedCounters(attempt, step, communication, at_peak, peak, total)


def parse_communication_row(row: Any) -> tuple[str, str, int, int] | None:
    """Returns (axis, collective, message bytes, wire bytes) of a row of collectives, measured or predicted, or None."""
    values = bounded_object(row)
    axis, collective = (str(values.get(key, ""))[:64] for key in ("axis", "collective"))
    message, wire = natural_number(values.get("message_bytes")), natural_number(values.get("wire_bytes"))
    return None if message is None or wire is None else (axis, collective, message, wire)


def byte_counts(value: Any) -> dict[str, int]:
    """Returns the entries of a JSON object that are non-negative integers."""
    return {key: size for key, item in bounded_object(value).items() if (size := natural_number(item)) is not None}
