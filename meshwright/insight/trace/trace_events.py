"""Events of the Chrome trace format, which Perfetto opens: slices, arrows between slices, and names."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

TRACKS = {
    "steps": "steps and phases",
    "pipeline": "pipeline passes",
    "waits": "waits in collectives",
    "outside": "evaluation, saves, restore",
    "checkpoints": "checkpoints in the background",
}
"""The tracks of a rank, in the order in which they are shown -> their names."""
TRACK_IDS = {track: index for index, track in enumerate(TRACKS, start=1)}
FIRST_LANE = 10
"""Collectives of profiled steps overlap, and slices of a track do not: they are on tracks with numbers from here."""
FIRST_THREAD = 100
"""The threads and streams of a profile are numbered from here."""


class EventWriter:
    """Formats events as lines of a JSON list. Times are microseconds, relative to `base`."""

    def __init__(self, base: float) -> None:
        self.base = base
        self.events = 0
        self.links = 0
        self._flows = count(1)
        self._named: set[tuple[int, int]] = set()
        """(rank, track), with track 0 for the process itself"""

    def line(self, event: dict[str, Any]) -> str:
        """Returns an event as a line that follows another one."""
        self.events += 1
        return ",\n" + json.dumps(event, separators=(",", ":"))

    def process_name(self, rank: int, name: str) -> str:
        """Names the process of a rank, once."""
        if (rank, 0) in self._named:
            return ""
        self._named.add((rank, 0))
        named = {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
        order = {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        return self.line(named) + self.line(order)

    def slice(self, rank: int, track: str, name: str, begin: float, end: float, **args: Any) -> str:
        """Returns a slice on one of the TRACKS of a rank."""
        return self.thread_slice(rank, TRACK_IDS[track], TRACKS[track], name, begin, end, **args)

    def thread_slice(
        self, rank: int, thread: int, thread_name: str, name: str, begin: float, end: float, **args: Any
    ) -> str:
        """Returns a slice on a track by its number; the first one names the track."""
        event = self.position("X", rank, thread, begin) | {"name": name, "dur": round(max(0.0, end - begin), 3)}
        return self.thread_name(rank, thread, thread_name) + self.line(event | ({"args": args} if args else {}))

    def thread_name(self, rank: int, thread: int, name: str) -> str:
        """Names a track, once, and places it in the order of the numbers."""
        if (rank, thread) in self._named:
            return ""
        self._named.add((rank, thread))
        common = {"ph": "M", "pid": rank, "tid": thread}
        order = {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}
        return self.line({**common, "name": "thread_name", "args": {"name": name}}) + self.line(order)

    def arrow(self, name: str, source: tuple[int, int, float], target: tuple[int, int, float]) -> str:
        """Returns an arrow from (rank, track, time) to another, between the slices that contain them."""
        flow, self.links = {"name": name, "cat": "rank", "id": next(self._flows)}, self.links + 1
        return self.line(self.position("s", *source) | flow) + self.line(
            self.position("f", *target) | flow | {"bp": "e"}
        )

    def position(self, kind: str, rank: int, thread: int, time: float) -> dict[str, Any]:
        return {"ph": kind, "pid": rank, "tid": thread, "ts": round(time - self.base, 3)}
