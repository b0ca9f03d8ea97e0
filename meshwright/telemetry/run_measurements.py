"""Reads the measurements of a run from its event files, as untrusted files: in one pass, within bounds. Torch-free.

The last attempt counts. Rank 0 contributes its newest steps, the other ranks fewer, and each its newest counters.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.io import open_regular_file
from meshwright.telemetry.events import MAX_LINE_BYTES, Event
from meshwright.telemetry.run_folder import RunFolder
from meshwright.telemetry.untrusted_records import (
    WARMUP_STEPS,
    RecordedCounters,
    bounded_object,
    finite_number,
    natural_number,
    parse_counters,
    parse_event,
)

MAX_FILE_BYTES = 1 << 30
"""Bytes that are read of one event file, from its end."""
MAX_STEPS, MAX_STEPS_OTHER_RANKS = 2048, 64
"""Steps that are kept of rank 0, and of every other rank."""
MAX_STEP_LINE_BYTES = 16 << 10
MAX_RANKS = 1024
STEP = b'{"kind":"step",'
OTHER_KINDS = tuple(f'{{"kind":"{kind}",'.encode() for kind in ("start", "restored", "counters", "end"))


@dataclass(frozen=True)
class RecordedStep:
    """The record of one step on one rank."""

    step: int
    seconds: float
    tokens: float
    phases: dict[str, float]
    counted: bool
    live: float | None
    """peak number of micro-batches in flight"""
    idle: float | None
    """fraction of the time that a pipeline rank waited"""
    imbalance: float | None
    dropped: float | None


@dataclass
class RankRecords:
    """The records of one rank in its last attempt."""

    attempt: int = 0
    start: Event = field(default_factory=dict)
    first_step: int = 0
    ended: bool = False
    counters: RecordedCounters | None = None
    lines: deque[bytes] = field(default_factory=deque)

    def steps(self) -> list[RecordedStep]:
        """Returns every step that was kept."""
        return [step for step in map(parse_step, self.lines) if step is not None]

    def timed_steps(self) -> list[RecordedStep]:
        """Returns the steps whose duration is typical: not among the first ones, and without counters."""
        return [step for step in self.steps() if not step.counted and step.step >= self.first_step + WARMUP_STEPS]


@dataclass(frozen=True)
class RunMeasurements:
    """The records of a run's last attempt."""

    first: RankRecords
    """the records of rank 0"""
    ranks: dict[int, RankRecords]
    """the ranks whose files were read and that are in the same attempt as rank 0"""
    unread: int
    """the number of ranks beyond MAX_RANKS, which were not read"""


def read_measurements(folder: RunFolder) -> RunMeasurements | None:
    """Reads the measurements of a run; returns None if rank 0 has not started."""
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
    """Returns the ranks that have an event file, in order."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
    matches = (re.fullmatch(r"rank-([0-9]{5,7})\.jsonl", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def read_rank_records(path: Path, max_steps: int) -> RankRecords:
    """Reads one event file and keeps the newest steps of its last attempt."""
    records = RankRecords()
    for line in read_lines(path):
        if line.startswith(STEP):
            if records.attempt and len(line) <= MAX_STEP_LINE_BYTES:
                records.lines.append(line)
        elif line.startswith(OTHER_KINDS) and (event := parse_event(line)) is not None:
            if event["kind"] == "start":
                records = RankRecords(natural_number(event.get("attempt")) or 0, event, lines=deque(maxlen=max_steps))
            elif event["kind"] == "restored":
                records.first_step = natural_number(event.get("step")) or 0
            elif event["kind"] == "end":
                records.ended = True
            else:
                records.counters = parse_counters(event) or records.counters
    return records


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the complete lines of a regular file, without those longer than MAX_LINE_BYTES."""
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


def parse_step(line: bytes) -> RecordedStep | None:
    """Returns a step record, or None for a line that is not one."""
    event = parse_event(line) or {}
    step, seconds = natural_number(event.get("step")), finite_number(event.get("seconds"))
    if step is None or seconds is None or seconds <= 0:
        return None
    pipe, experts = bounded_object(event.get("pipeline")), bounded_object(event.get("experts"))
    phases = {
        phase: seconds_of_phase
        for phase, value in bounded_object(event.get("phases")).items()
        if (seconds_of_phase := finite_number(value)) is not None
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
