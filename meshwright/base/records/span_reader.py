"""Reads the spans of a run, as untrusted files: in one pass, with the records of one step of all ranks in memory.

Times are in microseconds of the clock of rank 0, since the Unix epoch. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.base.io import open_regular_file
from meshwright.base.records.events import MAX_LINE_BYTES, Event
from meshwright.base.records.phases import PHASES, STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.spans import older_file
from meshwright.base.records.untrusted_records import bounded_object, finite_number, natural_number, parse_event

MAX_RANKS = 512
"""Ranks whose spans are read; each has an open file."""
MAX_FILE_BYTES = 64 << 20
"""Bytes that are read of one file."""
MAX_SECONDS = 1 << 40
"""Unix seconds beyond which a time is not valid."""
MAX_MICROSECONDS = 1 << 42
MAX_SPANS = 256
"""Spans of a rank that are read from one step to the next."""
STEP_LINE = re.compile(rb'\{"kind":"step","attempt":[0-9]{1,9},"step":([0-9]{1,18}),')
SPAN_NAMES = (*PHASES, "checkpoint", "profile")

Interval = tuple[float, float]
"""begin and end"""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is in the layout of an attempt, and the offset of its clock."""

    rank: int
    attempt: int = 0
    ranks: int = 1
    coordinates: dict[str, int] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    device: str = ""
    clock_offset: float = 0.0
    """seconds that the clock of the rank is ahead of that of rank 0"""

    @property
    def name(self) -> str:
        """Such as "rank 3 (stage 1, tensor 0)"."""
        places = [f"{axis} {index}" for axis, index in self.coordinates.items() if axis != "pipeline"]
        if self.stages:
            plural = "s" if len(self.stages) > 1 else ""
            places.insert(0, f"stage{plural} " + " and ".join(map(str, self.stages)))
        return f"rank {self.rank}" + (f" ({', '.join(places)})" if places else "")


@dataclass(frozen=True)
class PhaseSpan:
    """One entry of a phase; under a pipeline, a pass of a stage with one micro-batch."""

    name: str
    begin: float
    end: float
    action: tuple[int, int] | None = None
    """(stage, micro-batch)"""


@dataclass(frozen=True)
class StepSpanRecord:
    """One step of a rank."""

    place: RankPlace
    attempt: int
    step: int
    phases: tuple[PhaseSpan, ...]
    waits: tuple[Interval, ...]

    @property
    def begin(self) -> float:
        return self.phases[0].begin

    @property
    def end(self) -> float:
        return self.phases[-1].end


@dataclass(frozen=True)
class OtherSpan:
    """Time outside of steps: an evaluation, a save, a restore."""

    place: RankPlace
    attempt: int
    step: int
    name: str
    begin: float
    end: float


Span = StepSpanRecord | OtherSpan


def span_ranks(folder: RunFolder) -> list[int]:
    """Returns the first MAX_RANKS ranks that have spans."""
    try:
        names = os.listdir(folder.trace)
    except OSError:
        return []
    matches = (re.fullmatch(r"rank-([0-9]{5,7})\.spans\.jsonl", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)[:MAX_RANKS]


def read_rank_spans(folder: RunFolder, rank: int, steps: Sequence[range] | None = None) -> Iterator[Span]:
    """Yields the spans of a rank in the order in which they were written; of the steps, those in `steps` only."""
    place, path = RankPlace(rank), folder.spans(rank)
    for line in read_files(path):
        if steps is not None and (number := step_number(line)) is not None and not any(number in s for s in steps):
            continue
        event = parse_event(line) or {}
        if event.get("kind") == "rank":
            place = parse_place(event, rank)
        elif event.get("kind") == "step" and (step := parse_step(event, place)) is not None:
            yield step
        elif event.get("kind") == "span" and (span := parse_span(event, place)) is not None:
            yield span


def step_number(line: bytes) -> int | None:
    """Returns the step of a line of a step without parsing the line; None for other lines."""
    match = STEP_LINE.match(line)
    return int(match[1]) if match else None


def newest_step(folder: RunFolder, rank: int) -> int:
    """Returns the newest step of a rank that is in its spans, or 0."""
    numbers = map(step_number, read_files(folder.spans(rank)))
    return max((number for number in numbers if number is not None), default=0)


def read_files(path: Path) -> Iterator[bytes]:
    """Yields the lines of the older and of the newer file."""
    yield from read_lines(older_file(path))
    yield from read_lines(path)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the complete lines of a file up to MAX_FILE_BYTES, without those longer than MAX_LINE_BYTES."""
    try:
        with open_regular_file(path) as file:
            left = MAX_FILE_BYTES
            while left > 0 and (line := file.readline(MAX_LINE_BYTES)):
                left -= len(line)
                if line.endswith(b"\n"):
                    yield line
    except OSError:
        return


def parse_place(event: Event, rank: int) -> RankPlace:
    """Returns a `rank` record; what is not valid is missing."""
    coordinates = {
        axis: index
        for axis, value in bounded_object(event.get("coordinates")).items()
        if (index := natural_number(value)) is not None
    }
    stages = event.get("stages")
    offset = finite_number(event.get("clock_offset")) or 0.0
    return RankPlace(
        rank,
        natural_number(event.get("attempt")) or 0,
        natural_number(event.get("ranks")) or 1,
        dict(list(coordinates.items())[:8]),
        tuple(stage for stage in stages[:64] if natural_number(stage) is not None) if isinstance(stages, list) else (),
        str(event.get("device", ""))[:16],
        offset if abs(offset) < MAX_SECONDS else 0.0,
    )


def parse_step(event: Event, place: RankPlace) -> StepSpanRecord | None:
    """Returns the spans of a step, or None for a record that is not one."""
    step, begin, end = natural_number(event.get("step")), parse_begin(event, place), event.get("end")
    entries, waits, actions = (event.get(name) for name in ("phases", "waits", "actions"))
    if step is None or begin is None or not isinstance(entries, list) or not is_ascending(entries, end):
        return None
    passes = iter(actions if isinstance(actions, list) else ())
    phases = []
    for (name, start), (_, stop) in pairwise([*entries, ("", end)]):
        action = parse_pair(next(passes, None)) if name in ("forward", "backward") else None
        phases.append(PhaseSpan(name, begin + start, begin + stop, action))
    intervals = map(parse_pair, waits if isinstance(waits, list) else ())
    return StepSpanRecord(
        place,
        place.attempt,
        step,
        tuple(phases),
        tuple((begin + pair[0], begin + pair[1]) for pair in intervals if pair is not None and pair[0] <= pair[1]),
    )


def parse_span(event: Event, place: RankPlace) -> OtherSpan | None:
    """Returns a span outside of steps, or None for a record that is not one."""
    step, begin, seconds = (
        natural_number(event.get("step")),
        parse_begin(event, place),
        finite_number(event.get("seconds")),
    )
    if step is None or begin is None or seconds is None or not 0 <= seconds * 1e6 < MAX_MICROSECONDS:
        return None
    name = event.get("name")
    return OtherSpan(place, place.attempt, step, name, begin, begin + seconds * 1e6) if name in SPAN_NAMES else None


def parse_begin(event: Event, place: RankPlace) -> float | None:
    """Returns when a span begins, on the clock of rank 0."""
    begin = finite_number(event.get("begin"))
    return (begin - place.clock_offset) * 1e6 if begin is not None and 0 <= begin < MAX_SECONDS else None


def is_ascending(entries: list[Any], end: Any) -> bool:
    """Whether `phases` of a step is a list of known phases with times that do not fall."""
    if not entries or not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        return False
    times = [*(time for _, time in entries), end]
    is_valid = all(natural_number(time) is not None and time < MAX_MICROSECONDS for time in times)
    return is_valid and all(name in STEP_PHASES for name, _ in entries) and all(a <= b for a, b in pairwise(times))


def parse_pair(value: Any) -> tuple[int, int] | None:
    """Returns a list of two natural numbers as a pair, or None."""
    if not isinstance(value, list) or len(value) != 2 or None in (pair := tuple(map(natural_number, value))):
        return None
    return pair if max(value) < MAX_MICROSECONDS else None  # type: ignore[return-value]


def read_spans(folder: RunFolder, steps: Sequence[range] | None = None) -> Iterator[list[Span]]:
    """Yields the spans of all ranks, step by step: what each rank recorded from one step to the next."""
    heads = [RankHead(read_rank_spans(folder, rank, steps)) for rank in span_ranks(folder)]
    while keys := [head.key for head in heads if head.key is not None]:
        first = min(keys)
        yield [span for head in heads for span in head.take(first)]


class RankHead:
    """The next span of a rank, with the attempt and step that it belongs to: those of the newest step before it."""

    def __init__(self, spans: Iterator[Span]) -> None:
        self._spans = spans
        self._span: Span | None = None
        self.key: tuple[int, int] | None = (0, 0)
        self._advance()

    def _advance(self) -> None:
        assert self.key is not None
        self._span = next(self._spans, None)
        if self._span is None:
            self.key = None
        elif isinstance(self._span, StepSpanRecord):
            self.key = max(self.key, (self._span.attempt, self._span.step))
        else:
            self.key = max(self.key, (self._span.attempt, 0))

    def take(self, key: tuple[int, int]) -> Iterator[Span]:
        """Yields the spans that belong to this attempt and step, at most MAX_SPANS."""
        left = MAX_SPANS
        while self.key == key:
            if self._span is not None and left > 0:
                yield self._span
            left -= 1
            self._advance()
