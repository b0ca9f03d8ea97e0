"""The timeline of one step on every rank, from the spans in a run folder. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.history.run_history import RunHistory
from meshwright.io import format_seconds, open_regular_file
from meshwright.observe.report.document import Bar, BarChart, Section, Table
from meshwright.observe.report.pictures import PHASE_CLASSES, WIDTH, spread
from meshwright.telemetry.phases import STEP_PHASES
from meshwright.telemetry.untrusted_records import bounded_object, finite_number, natural_number, parse_event

TAIL_BYTES = 2 << 20
"""Bytes that are read of a file of spans, from its end."""
MAX_RANKS = 16
"""Ranks that are drawn."""
MAX_ENTRIES = 400
"""Entries of one rank that are drawn."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class StepTimeline:
    """One step of one rank: (phase, begin, end) of every entry, in seconds of the clock of rank 0."""

    begin: float
    end: float
    entries: list[tuple[str, float, float]]
    waits: list[tuple[float, float]]
    """(begin, end) of the waits for other ranks in phases other than `sync`"""


def timeline_section(history: RunHistory, attempt: int, near: float | None) -> Section | None:
    """Draws the newest step that all drawn ranks recorded and whose duration is closest to `near`, the median.

    Returns None if the run has no spans.
    """
    ranks = spread(history.ranks, MAX_RANKS)
    spans = {
        rank: read_spans(history.folder.root / "trace" / f"rank-{rank:05d}.spans.jsonl", attempt) for rank in ranks
    }
    spans = {rank: steps for rank, steps in spans.items() if steps}
    if 0 not in spans:
        return None
    shared = set.intersection(*(set(steps) for steps in spans.values()))
    if not shared:
        return None
    step = min(shared, key=lambda each: (abs(spans[0][each].end - spans[0][each].begin - (near or 0.0)), -each))
    rows = {rank: steps[step] for rank, steps in spans.items()}
    return draw(step, rows, len(history.ranks))


def draw(step: int, rows: Mapping[int, StepTimeline], ranks: int) -> Section:
    first, last = min(row.begin for row in rows.values()), max(row.end for row in rows.values())
    scale = WIDTH / (last - first) if last > first else 0.0

    def segment(name: str, begin: float, end: float, rank: int) -> tuple[str, float, float, str]:
        label = f"rank {rank}, {name}: {format_seconds(end - begin)}"
        return PHASE_CLASSES[name], (begin - first) * scale, max(0.0, end - begin) * scale, label

    bars, table, used = [], [], dict[str, None]()
    for rank, row in rows.items():
        segments = [segment(name, begin, end, rank) for name, begin, end in row.entries]
        segments += [segment("wait", begin, end, rank) for begin, end in row.waits]
        used |= dict.fromkeys(name for name, *_ in row.entries) | ({"wait": None} if row.waits else {})
        bars.append(Bar(f"rank {rank}", segments, format_seconds(row.end - row.begin)))
        synced = [(begin, end) for name, begin, end in row.entries if name == "sync"]
        waited = sum(end - begin for begin, end in (*synced, *row.waits))
        table.append([f"rank {rank}", *(format_seconds(each) for each in (row.begin - first, row.end - first, waited))])
    names = {"sync": "sync (exposed communication)", "wait": "wait for other ranks inside a phase"}
    order = [name for name in (*STEP_PHASES, "wait") if name in used]
    chart = BarChart("", bars, [(PHASE_CLASSES[name], names.get(name, name)) for name in order])
    drawn = f"; {len(rows)} of {ranks:,} ranks are drawn" if len(rows) < ranks else ""
    sentence = f"Step {step:,} from its begin on the first rank, in {format_seconds(last - first)}{drawn}."
    note = "Times are those of the clock of rank 0. meshwright trace RUN writes all steps for Perfetto."
    headings = ("", "begin", "end", "waits for other ranks")
    return Section("Timeline of a step", [sentence], tables=[Table(headings, table)], bars=[chart], notes=[note])


def read_spans(path: Path, attempt: int) -> dict[int, StepTimeline]:
    """The steps of an attempt in the last TAIL_BYTES of an untrusted file, by number."""
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = parse_event(file.readline(1 << 16)) or {}
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")[(1 if size > TAIL_BYTES else 0) : -1]
    except OSError:
        return {}
    offset = finite_number(head.get("clock_offset")) or 0.0
    steps: dict[int, StepTimeline] = {}
    for record in map(parse_event, lines):
        if record is None or record.get("attempt") != attempt:
            continue
        if record.get("kind") == "rank":
            offset = finite_number(record.get("clock_offset")) or 0.0
        elif record.get("kind") == "step" and (parsed := parse_spans(bounded_object(record), offset)) is not None:
            steps[parsed[0]] = parsed[1]
    return steps


def parse_spans(record: Mapping[str, Any], offset: float) -> tuple[int, StepTimeline] | None:
    """(step, spans) of a record; None if it is not one. `offset` is what the rank's clock is ahead of rank 0's."""
    step, begin, end = natural_number(record.get("step")), finite_number(record.get("begin")), micro(record.get("end"))
    phases, waits = record.get("phases"), record.get("waits")
    if step is None or begin is None or end is None or not isinstance(phases, list) or len(phases) > MAX_ENTRIES:
        return None
    begin -= offset
    starts = [(entry[0], at) for entry in phases if is_pair(entry) and (at := micro(entry[1])) is not None]
    ends = [*(at for _, at in starts), end][1:]
    entries = [
        (phase, begin + at, begin + max(at, until))
        for (phase, at), until in zip(starts, ends, strict=True)
        if phase in STEP_PHASES
    ]
    pairs = [pair for pair in waits if is_pair(pair)] if isinstance(waits, list) and len(waits) <= MAX_ENTRIES else []
    found = [(begin + low, begin + high) for low, high in map(micro_pair, pairs) if 0 <= low <= high]
    synced = [(low, high) for phase, low, high in entries if phase == "sync"]
    inside = [wait for wait in found if not any(low <= sum(wait) / 2 <= high for low, high in synced)]
    return step, StepTimeline(begin, begin + end, entries, inside)


def is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def micro_pair(pair: list[Any]) -> tuple[float, float]:
    low, high = map(micro, pair)
    return (low, high) if low is not None and high is not None else (-1.0, -1.0)


def micro(value: Any) -> float | None:
    """Seconds from microseconds."""
    number = finite_number(value)
    return number / MICROSECONDS if number is not None else None
