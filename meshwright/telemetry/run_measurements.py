"""What a run measured, out of its event files: read in passing and within bounds, for the folder may be a stranger's;
torch-free.

The last attempt counts. Of the first rank the newest steps are kept, of the others the newest few, and of each the
newest ledger.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.io import open_regular_file
from meshwright.telemetry.events import MAX_LINE_BYTES, Event
from meshwright.telemetry.run_folder import RunFolder

WARMUP_STEPS = 2
"""Steps of an attempt that pay for what is made once."""
MAX_FILE_BYTES = 1 << 30
"""of one event file, from its end"""
MAX_STEPS, MAX_STEPS_OTHER_RANKS = 2048, 64
"""of the first rank, of others"""
MAX_STEP_LINE_BYTES = 16 << 10
MAX_RANKS = 1024
MAX_TABLE_ROWS = 256
MAX_NUMBER = 1 << 62
STEP = b'{"kind":"step",'
OTHER_KINDS = tuple(f'{{"kind":"{kind}",'.encode() for kind in ("start", "restored", "counters", "end"))


@dataclass(frozen=True)
class RecordedStep:
    """One step as a rank recorded it."""

    step: int
    seconds: float
    tokens: float
    phases: dict[str, float]
    counted: bool
    live: float | None
    idle: float | None
    imbalance: float | None
    dropped: float | None


@dataclass(frozen=True)
class RecordedCounters:
    """One step's ledger."""

    step: int
    traffic: list[tuple[str, str, int, int]]
    """axis, collective, bytes of messages, bytes on the wire"""
    at_peak: dict[str, int]
    peak: dict[str, int]
    peak_total: int


@dataclass
class RankRecords:
    """One rank in its last attempt."""

    attempt: int = 0
    start: Event = field(default_factory=dict)
    began: int = 0
    ended: bool = False
    counters: RecordedCounters | None = None
    lines: deque[bytes] = field(default_factory=deque)

    def steps(self) -> list[RecordedStep]:
        """Every step that is left of it, counted ones and first ones too."""
        return [step for step in map(parse_step, self.lines) if step is not None]

    def timed_steps(self) -> list[RecordedStep]:
        """Those that took as long as a step takes."""
        return [step for step in self.steps() if not step.counted and step.step >= self.began + WARMUP_STEPS]


@dataclass(frozen=True)
class RunMeasurements:
    first: RankRecords
    ranks: dict[int, RankRecords]
    """those whose files were read, in the same attempt as the first"""
    unread: int
    """ranks beyond MOST_RANKS"""


def read_measurements(folder: RunFolder) -> RunMeasurements | None:
    """None where no rank has begun."""
    first = read_rank_records(folder.events(0), MAX_STEPS)
    if not first.attempt:
        return None
    ranks, unread = {0: first}, 0
    size = natural_number(first.start.get("ranks")) or 1
    for rank in ranks_with_events(folder.root / "events"):
        if 0 < rank < size:
            if len(ranks) >= MAX_RANKS:
                unread += 1
                continue
            other = read_rank_records(folder.events(rank), MAX_STEPS_OTHER_RANKS)
            if other.attempt == first.attempt:
                ranks[rank] = other
    return RunMeasurements(first, ranks, unread)


def ranks_with_events(folder: Path) -> list[int]:
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
    found = (re.fullmatch(r"rank-([0-9]{5,7})\.jsonl", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def read_rank_records(path: Path, steps: int) -> RankRecords:
    found = RankRecords()
    for line in read_lines(path):
        if line.startswith(STEP):
            if found.attempt and len(line) <= MAX_STEP_LINE_BYTES:
                found.lines.append(line)
        elif line.startswith(OTHER_KINDS) and (event := parse_event(line)) is not None:
            if event["kind"] == "start":
                found = RankRecords(natural_number(event.get("attempt")) or 0, event, lines=deque(maxlen=steps))
            elif event["kind"] == "restored":
                found.began = natural_number(event.get("step")) or 0
            elif event["kind"] == "end":
                found.ended = True
            else:
                found.counters = parse_counters(event) or found.counters
    return found


def read_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a plain file; one longer than ours become is passed over."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_FILE_BYTES))
            left, rest = MAX_FILE_BYTES, b""
            while left > 0 and (block := file.read(min(left, MAX_LINE_BYTES))):
                left -= len(block)
                *lines, rest = (rest + block).split(b"\n")
                yield from lines
                if len(rest) > MAX_LINE_BYTES:
                    rest = b""
    except OSError:
        return


def parse_event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def finite_number(value: Any) -> float | None:
    """A finite number, or none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_NUMBER:
        return None
    return float(value) if isfinite(value) else None


def natural_number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_NUMBER else None


def bounded_object(value: Any) -> dict[str, Any]:
    """A JSON object with few short names, or an empty one."""
    rows = value.items() if isinstance(value, dict) else ()
    return {key: item for key, item in rows if len(key) <= 64} if len(rows) <= MAX_TABLE_ROWS else {}


def parse_step(line: bytes) -> RecordedStep | None:
    event = parse_event(line) or {}
    step, seconds = natural_number(event.get("step")), finite_number(event.get("seconds"))
    if step is None or seconds is None or seconds <= 0:
        return None
    pipe, experts = bounded_object(event.get("pipeline")), bounded_object(event.get("experts"))
    phases = {
        phase: spent
        for phase, value in bounded_object(event.get("phases")).items()
        if (spent := finite_number(value)) is not None
    }
    return RecordedStep(
        step,
        seconds,
        finite_number(event.get("tokens")) or 0.0,
        phases,
        event.get("counted") is True,
        finite_number(pipe.get("live")),
        finite_number(pipe.get("idle")),
        finite_number(experts.get("imbalance")),
        finite_number(experts.get("dropped")),
    )


def parse_counters(event: Event) -> RecordedCounters | None:
    memory, rows = bounded_object(event.get("memory")), event.get("traffic")
    step, total = natural_number(event.get("step")), natural_number(memory.get("peak_total"))
    if step is None or total is None or not isinstance(rows, list) or len(rows) > MAX_TABLE_ROWS:
        return None
    traffic = [sent for row in rows if (sent := parse_traffic_row(row)) is not None]
    return RecordedCounters(step, traffic, byte_counts(memory.get("at_peak")), byte_counts(memory.get("peak")), total)


def parse_traffic_row(row: Any) -> tuple[str, str, int, int] | None:
    """A row of bytes sent, of a ledger or of a prediction."""
    values = bounded_object(row)
    axis, collective = (str(values.get(key, ""))[:64] for key in ("axis", "collective"))
    message, wire = natural_number(values.get("message_bytes")), natural_number(values.get("wire_bytes"))
    return None if message is None or wire is None else (axis, collective, message, wire)


def byte_counts(value: Any) -> dict[str, int]:
    return {key: size for key, item in bounded_object(value).items() if (size := natural_number(item)) is not None}
