"""Checks a merged trace against the rules of the Chrome trace format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
ROUNDING = 0.002
"""Microseconds: times and durations are rounded to 0.001."""


def read_trace(path: Path) -> list[Event]:
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    events: list[Event] = json.loads(text)["traceEvents"]
    return events


def slices(events: list[Event], track: str, rank: int | None = None) -> list[Event]:
    """The slices of the tracks whose name begins with `track`."""
    named = [e for e in events if e["name"] == "thread_name" and e["args"]["name"].startswith(track)]
    places = {(e["pid"], e["tid"]) for e in named if rank in (None, e["pid"])}
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in places]


def arrows(events: list[Event]) -> list[tuple[Event, Event]]:
    """The pairs of events of the arrows between ranks."""
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf" and event["cat"] == "rank":
            flows[event["id"]].append(event)
    return [(first, second) for first, second in flows.values()]


def check_format(events: list[Event]) -> None:
    """Slices nest and are in order on every track of Meshwright, every track has a name, and arrows are pairs that
    begin and end inside of slices.
    """
    assert {event["ph"] for event in events} <= {"M", "X", "s", "f"}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert set(tracks) <= names
    assert {pid for pid, _ in tracks} == processes
    for (_, thread), track in tracks.items():
        starts = [event["ts"] for event in track]
        assert thread >= 100 or starts == sorted(starts)  # Kineto's own events are in its own order
        check_nesting(track)
    for first, second in arrows(events):
        assert (first["ph"], second["ph"], second["bp"]) == ("s", "f", "e")
        assert first["pid"] != second["pid"]
        assert first["ts"] <= second["ts"] + ROUNDING
        for end in (first, second):
            assert any(
                e["ts"] - ROUNDING <= end["ts"] <= e["ts"] + e["dur"] + ROUNDING for e in tracks[end["pid"], end["tid"]]
            )


def check_nesting(track: list[Event]) -> None:
    """Two slices of a track are one inside the other, or apart."""
    ends: list[float] = []
    for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + ROUNDING:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + ROUNDING, event
        ends.append(event["ts"] + event["dur"])
