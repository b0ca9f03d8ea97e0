"""The timeline of one step: what every rank did from the beginning to the end of the step. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.io import open_regular_file
from meshwright.base.records.events import Event
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.untrusted_records import finite_number, natural_number, parse_event

MAX_ROWS = 256
"""Ranks that have a row."""
MAX_SPANS = 6000
"""Spans and waits of all rows together; later ones are left out."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of a file of spans in which a step is looked for; older steps are drawn from their records."""


@dataclass
class TimelineRow:
    """One rank: (start, end, index of the phase, label) of its spans and (start, end) of its waits."""

    rank: int
    begin: float
    """Unix seconds by the clock of rank 0; the times of spans and waits are seconds since then"""
    spans: list[tuple[float, float, int, str]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.begin + max((span[1] for span in self.spans), default=0.0)

    def to_json(self, origin: float, limit: int) -> dict[str, Any]:
        """The row in seconds since `origin`, with at most `limit` spans and waits each."""
        shift = self.begin - origin
        return {
            "rank": self.rank,
            "spans": [
                [round(begin + shift, 7), round(end + shift, 7), kind, label]
                for begin, end, kind, label in self.spans[:limit]
            ],
            "waits": [[round(begin + shift, 7), round(end + shift, 7)] for begin, end in self.waits[:limit]],
        }


def describe_timeline(history: RunHistory, step: int | None) -> dict[str, Any]:
    """The timeline of a step, by default of the newest one that every rank has completed.

    It is drawn from the spans of the ranks, or from the step records for a step whose spans are gone.
    """
    tables = {rank: table for rank in history.ranks[:MAX_ROWS] if len(table := history.steps(rank))}
    if not tables:
        return {"step": None, "rows": []}
    newest = [int(table.step[-1]) for table in tables.values()]
    step = min(newest) if step is None else min(step, max(newest))
    records = {rank: record for rank, table in tables.items() if (record := last_row(table, step)) is not None}
    found = [read_spans(history.folder.spans(rank), rank, record) for rank, record in records.items()]
    rows = [row for row in found if row is not None]
    complete = len(rows) == len(records)
    if not complete:
        rows = [row_from_record(rank, record) for rank, record in records.items()]
    origin = min((row.begin for row in rows), default=0.0)
    limit = MAX_SPANS // max(1, len(rows))
    return {
        "step": step,
        "source": "spans" if complete else "records",
        "seconds": max((row.end for row in rows), default=0.0) - origin,
        "kinds": list(STEP_PHASES),
        "pipeline": complete and any(span[3] for row in rows for span in row.spans[:limit]),
        "rows": [row.to_json(origin, limit) for row in rows],
    }


def last_row(table: StepTable, step: int) -> StepTable | None:
    """The row of a step that the last attempt recorded, as a table of one row."""
    found = np.flatnonzero(table.step == step)
    return table.select(slice(found[-1], found[-1] + 1)) if len(found) else None


def row_from_record(rank: int, record: StepTable) -> TimelineRow:
    """The phases of a step in their order; what a phase waited is drawn at its end."""
    row, now = TimelineRow(rank, float(np.nan_to_num(record.begin[0]))), 0.0
    for kind, phase in enumerate(STEP_PHASES):
        seconds = max(0.0, float(np.nan_to_num(record.phases[phase][0])))
        waited = seconds if phase == "sync" else min(seconds, float(np.nan_to_num(record.waits[phase][0])))
        if seconds > 0:
            row.spans.append((now, now + seconds, kind, ""))
        if waited > 0:
            row.waits.append((now + seconds - waited, now + seconds))
        now += seconds
    return row


def read_spans(path: Path, rank: int, record: StepTable) -> TimelineRow | None:
    """The row of a recorded step from the spans of a rank, which are an untrusted file; None if it is not there."""
    try:
        if path.parent.is_symlink():
            return None
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.readline(TAIL_BYTES)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError:
        return None
    place = tail.rfind(b'{"kind":"step","attempt":%d,"step":%d,' % (record.attempt[0], record.step[0]))
    span = parse_event(line_around(tail, place)) if place >= 0 else None
    if span is None:
        return None
    about = tail.rfind(b'{"kind":"rank",', 0, place)
    offset = (parse_event(line_around(tail, about) if about >= 0 else head) or {}).get("clock_offset")
    begin = finite_number(span.get("begin"))
    if begin is None:
        return None
    row = TimelineRow(rank, begin - (finite_number(offset) or 0.0))
    row.spans = list(parse_phases(span))
    row.waits = [
        (begin, end) for pair in as_list(span.get("waits")) if (begin := pair_at(pair, 0)) <= (end := pair_at(pair, 1))
    ]
    return row if row.spans else None


def parse_phases(span: Event) -> Iterator[tuple[float, float, int, str]]:
    """Yields (begin, end, index of the phase, label); the label of a pass of a pipeline is its micro-batch."""
    entries = [entry for entry in as_list(span.get("phases")) if isinstance(entry, list) and len(entry) == 2]
    actions = iter(as_list(span.get("actions")))
    ends = [*(entry[1] for entry in entries[1:]), span.get("end")]
    for (phase, begin), end in zip(entries, ends, strict=False):  # without entries, the end has none either
        label = ""
        if phase in ("forward", "backward"):
            action = next(actions, None)
            micro_batch = natural_number(action[1]) if isinstance(action, list) and len(action) == 2 else None
            label = "" if micro_batch is None else str(micro_batch)
        first, last = finite_number(begin), finite_number(end)
        if phase in STEP_PHASES and first is not None and last is not None and last > first:
            yield first / 1e6, last / 1e6, STEP_PHASES.index(phase), label


def pair_at(pair: Any, place: int) -> float:
    """A time of a (begin, end) pair in seconds; NaN if it is not one."""
    value = finite_number(pair[place]) if isinstance(pair, list) and len(pair) == 2 else None
    return float("nan") if value is None else value / 1e6


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def line_around(content: bytes, place: int) -> bytes:
    """The line that contains a place."""
    end = content.find(b"\n", place)
    return content[content.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(content)]
