"""Reads the profiles of a run, as untrusted files: event by event, in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.base.io import gzip_text_limit, open_regular_file, parse_json
from meshwright.base.records.events import Event
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.span_reader import RankPlace, parse_place
from meshwright.base.records.untrusted_records import bounded_object, finite_number, natural_number
from meshwright.errors import ConfigError

CHUNK = 1 << 20
MAX_TEXT = 4 << 30
"""Bytes that are read of one profile: a compressed file of a few megabytes may contain terabytes."""
MAX_HEAD = 16 << 20
"""Characters of a profile before its first event."""
MAX_EVENT = 1 << 20
"""Characters of one event."""
MAX_PROFILES = 4096
MAX_ROWS = 100_000
"""Collectives that are read of one profile."""
EXPECTED = "a profile that `meshwright train --profile` wrote"
NAME = re.compile(r"rank-([0-9]{5,7})\.steps-([0-9]{1,12})-([0-9]{1,12})\.a([0-9]{4,9})\.json\.gz")


def parse_float(text: str) -> float | None:
    """Returns a number of a profile; None for one that is too large for JSON that others read, such as 1e999."""
    value = float(text)
    return value if isfinite(value) else None


DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=parse_float)


@dataclass(frozen=True, order=True)
class ProfilePath:
    """A profile by its file name."""

    start: int
    stop: int
    attempt: int
    rank: int
    path: Path = field(compare=False)

    @property
    def steps(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class RecordedCollective:
    """A collective as the profiled rank recorded it when it began."""

    step: int
    group: str
    sequence: int
    collective: str
    begin: float
    """microseconds of the clock of rank 0"""
    elements: int


@dataclass(frozen=True)
class ProfileHead:
    """What a profile says about itself before its events."""

    place: RankPlace
    base: float
    """microseconds that are added to the times of its events, to have them on the clock of rank 0"""
    axes: dict[str, str]
    """process group -> axis"""
    collectives: list[RecordedCollective]
    is_complete: bool = True
    """whether all collectives of the steps are recorded"""

    def axis(self, group: str) -> str:
        """The axis of a process group; small control messages use the group of all ranks."""
        return self.axes.get(group, "control")


def find_profiles(folder: RunFolder) -> list[ProfilePath]:
    """Returns the profiles of a run, by steps and rank. Where several attempts profiled steps, the last one counts."""
    try:
        names = sorted(os.listdir(folder.trace))
    except OSError:
        return []
    found: dict[tuple[int, int, int], ProfilePath] = {}
    for match in filter(None, map(NAME.fullmatch, names[: 16 * MAX_PROFILES])):
        rank, start, stop, attempt = map(int, match.groups())
        profile = ProfilePath(start, stop, attempt, rank, folder.trace / match[0])
        found[start, stop, rank] = max(profile, found.get((start, stop, rank), profile))
    return sorted(found.values())[:MAX_PROFILES]


class ProfileReader:
    """Reads one profile: first `head`, then the events. `notes` says what was not read."""

    def __init__(self, profile: ProfilePath) -> None:
        self.profile = profile
        self.notes: list[str] = []
        self._text = self._chunks()
        self._buffer = ""
        self.head = self._read_head()
        if not self.head.is_complete:
            self.notes.append("it has the newest collectives of a step only; TORCH_FR_BUFFER_SIZE=20000 keeps more")

    def _chunks(self) -> Iterator[str]:
        """Yields the text in chunks of bounded size."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            with open_regular_file(self.profile.path) as file, gzip.GzipFile(fileobj=file) as text:
                left = min(MAX_TEXT, gzip_text_limit(file))
                while left > 0 and (chunk := text.read(CHUNK)):
                    left -= len(chunk)
                    yield decoder.decode(chunk)
        except (OSError, EOFError, zlib.error) as error:
            self.notes.append(f"it cannot be read: {error}")

    def _read_head(self) -> ProfileHead:
        while (end := self._buffer.find('"traceEvents"')) < 0 and len(self._buffer) < MAX_HEAD:
            if (chunk := next(self._text, None)) is None:
                break
            self._buffer += chunk
        if end < 0:
            raise ConfigError(f"{self.profile.path} has no events", f"expected {EXPECTED}")
        text = self._buffer[:end].rstrip().rstrip(",") + "}"
        head = parse_json(text.encode(), str(self.profile.path), EXPECTED)
        self._buffer = self._buffer[self._buffer.find("[", end) + 1 :]
        return parse_head(head if isinstance(head, dict) else {}, self.profile.rank)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the events; one that is cut off or no JSON ends the profile with a note."""
        at = 0
        while True:
            while at < len(self._buffer) and self._buffer[at] in " \t\r\n,":
                at += 1
            if self._buffer[at : at + 1] == "]":
                return
            try:
                event, at = DECODER.raw_decode(self._buffer, at)
            except (ValueError, RecursionError):
                chunk = next(self._text, None)
                if chunk is None or len(self._buffer) - at > MAX_EVENT:
                    self.notes.append("it ends before its last event, or has an event that is no JSON")
                    return
                self._buffer, at = self._buffer[at:] + chunk, 0
                continue
            if isinstance(event, dict):
                yield event


def parse_head(head: Event, rank: int) -> ProfileHead:
    """Returns the head of a profile; what is not valid is missing."""
    own = head.get("meshwright")
    own = own if isinstance(own, dict) else {}
    place = parse_place(own, rank)
    base = (natural_number(head.get("baseTimeNanoseconds")) or 0) / 1e3 - place.clock_offset * 1e6
    axes = {group: str(axis)[:32] for group, axis in bounded_object(own.get("axes")).items()}
    rows = own.get("collectives")
    parsed = (parse_row(row, place) for row in (rows if isinstance(rows, list) else ())[:MAX_ROWS])
    return ProfileHead(place, base, axes, [row for row in parsed if row is not None], not own.get("incomplete_steps"))


def parse_row(row: Any, place: RankPlace) -> RecordedCollective | None:
    """Returns a row of the recorded collectives, or None."""
    if not isinstance(row, list) or len(row) != 6:
        return None
    step, sequence, elements = (natural_number(row[index]) for index in (0, 2, 5))
    time = finite_number(row[4])
    if step is None or sequence is None or time is None:
        return None
    begin = time - place.clock_offset * 1e6
    return RecordedCollective(step, str(row[1])[:64], sequence, str(row[3])[:64], begin, elements or 0)
