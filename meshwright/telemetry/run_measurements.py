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
from meshwright.telemetry.events import LONGEST_LINE, Event
from meshwright.telemetry.run_folder import RunFolder

FIRST = 2
"""Steps of an attempt that pay for what is made once."""
MOST_BYTES = 1 << 30
"""of one event file, from its end"""
MOST_STEPS, FEW_STEPS = 2048, 64
"""of the first rank, of others"""
LONGEST_STEP = 16 << 10
MOST_RANKS = 1024
MOST_ROWS = 256
LARGEST = 1 << 62
STEP = b'{"kind":"step",'
OTHERS = tuple(f'{{"kind":"{kind}",'.encode() for kind in ("start", "restored", "ledger", "end"))


@dataclass(frozen=True)
class Made:
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
class Counted:
    """One step's ledger."""

    step: int
    traffic: list[tuple[str, str, int, int]]
    """axis, collective, bytes of messages, bytes on the wire"""
    at_peak: dict[str, int]
    peak: dict[str, int]
    peak_total: int


@dataclass
class Seen:
    """One rank in its last attempt."""

    attempt: int = 0
    start: Event = field(default_factory=dict)
    began: int = 0
    ended: bool = False
    ledger: Counted | None = None
    lines: deque[bytes] = field(default_factory=deque)

    def steps(self) -> list[Made]:
        """Every step that is left of it, counted ones and first ones too."""
        return [step for step in map(step_of, self.lines) if step is not None]

    def plain_steps(self) -> list[Made]:
        """Those that took as long as a step takes."""
        return [step for step in self.steps() if not step.counted and step.step >= self.began + FIRST]


@dataclass(frozen=True)
class Measured:
    first: Seen
    ranks: dict[int, Seen]
    """those whose files were read, in the same attempt as the first"""
    unread: int
    """ranks beyond MOST_RANKS"""


def measured(folder: RunFolder) -> Measured | None:
    """None where no rank has begun."""
    first = seen(folder.events(0), MOST_STEPS)
    if not first.attempt:
        return None
    ranks, unread = {0: first}, 0
    size = whole(first.start.get("ranks")) or 1
    for rank in numbered(folder.root / "events"):
        if 0 < rank < size:
            if len(ranks) >= MOST_RANKS:
                unread += 1
                continue
            other = seen(folder.events(rank), FEW_STEPS)
            if other.attempt == first.attempt:
                ranks[rank] = other
    return Measured(first, ranks, unread)


def numbered(folder: Path) -> list[int]:
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
    found = (re.fullmatch(r"rank-([0-9]{5,7})\.jsonl", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def seen(path: Path, steps: int) -> Seen:
    found = Seen()
    for line in lines_of(path):
        if line.startswith(STEP):
            if found.attempt and len(line) <= LONGEST_STEP:
                found.lines.append(line)
        elif line.startswith(OTHERS) and (event := parsed(line)) is not None:
            if event["kind"] == "start":
                found = Seen(whole(event.get("attempt")) or 0, event, lines=deque(maxlen=steps))
            elif event["kind"] == "restored":
                found.began = whole(event.get("step")) or 0
            elif event["kind"] == "end":
                found.ended = True
            else:
                found.ledger = counted_of(event) or found.ledger
    return found


def lines_of(path: Path) -> Iterator[bytes]:
    """Whole lines of a plain file; one longer than ours become is passed over."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            left, rest = MOST_BYTES, b""
            while left > 0 and (block := file.read(min(left, LONGEST_LINE))):
                left -= len(block)
                *lines, rest = (rest + block).split(b"\n")
                yield from lines
                if len(rest) > LONGEST_LINE:
                    rest = b""
    except OSError:
        return


def parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def number(value: Any) -> float | None:
    """A finite number, or none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        return None
    return float(value) if isfinite(value) else None


def whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < LARGEST else None


def table(value: Any) -> dict[str, Any]:
    """A JSON object with few short names, or an empty one."""
    rows = value.items() if isinstance(value, dict) else ()
    return {key: item for key, item in rows if len(key) <= 64} if len(rows) <= MOST_ROWS else {}


def step_of(line: bytes) -> Made | None:
    event = parsed(line) or {}
    step, seconds = whole(event.get("step")), number(event.get("seconds"))
    if step is None or seconds is None or seconds <= 0:
        return None
    pipe, experts = table(event.get("pipeline")), table(event.get("experts"))
    phases = {
        phase: spent for phase, value in table(event.get("phases")).items() if (spent := number(value)) is not None
    }
    return Made(
        step,
        seconds,
        number(event.get("tokens")) or 0.0,
        phases,
        event.get("counted") is True,
        number(pipe.get("live")),
        number(pipe.get("idle")),
        number(experts.get("imbalance")),
        number(experts.get("dropped")),
    )


def counted_of(event: Event) -> Counted | None:
    memory, rows = table(event.get("memory")), event.get("traffic")
    step, total = whole(event.get("step")), whole(memory.get("peak_total"))
    if step is None or total is None or not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return None
    traffic = [sent for row in rows if (sent := sent_of(row)) is not None]
    return Counted(step, traffic, sizes(memory.get("at_peak")), sizes(memory.get("peak")), total)


def sent_of(row: Any) -> tuple[str, str, int, int] | None:
    """A row of bytes sent, of a ledger or of a prediction."""
    values = table(row)
    axis, collective = (str(values.get(key, ""))[:64] for key in ("axis", "collective"))
    message, wire = whole(values.get("message_bytes")), whole(values.get("wire_bytes"))
    return None if message is None or wire is None else (axis, collective, message, wire)


def sizes(value: Any) -> dict[str, int]:
    return {key: size for key, item in table(value).items() if (size := whole(item)) is not None}
