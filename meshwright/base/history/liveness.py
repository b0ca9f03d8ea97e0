"""Tells whether the processes of the newest attempt run: by their ids, or by what they write. Torch-free."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from itertools import islice

from meshwright.base.checkpoint.listing import open_run_store, read_lease
from meshwright.base.records.attempt_files import read_text
from meshwright.base.records.heartbeat import HeartbeatReading, process_start, read_heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.lease import process_identity

MAX_RANKS = 1024
"""Ranks whose files are read."""
MAX_NAMES = 1 << 14
"""Names in one folder that are looked at."""
FRESH_SECONDS = 60.0
"""A job on another host counts as running if its newest record is younger, or its counters have advanced since."""

GAP_SECONDS = 5.0
"""If nobody has read the heartbeats for longer, it is not known when between the two readings a counter advanced."""


@dataclass
class Liveness:
    """What is known about the processes of the newest attempt."""

    attempt: int = 0
    is_alive: bool = False
    on_this_host: bool = False
    """whether the process ids of the attempt are those of this host, so that they can be checked"""
    heartbeats: dict[int, HeartbeatReading] = field(default_factory=dict)
    advanced: dict[int, float] = field(default_factory=dict)
    """rank -> when its beat counter was last seen to advance (monotonic clock)"""
    _read: float = 0.0
    _beat: str = ""
    _beat_advanced: float | None = None

    def update(self, folder: RunFolder, attempt: int, newest_record: float | None, now: float) -> None:
        """Reads the lease and the heartbeats of an attempt. `newest_record` and `now` are Unix seconds."""
        clock = time.monotonic()
        if attempt != self.attempt:
            self._beat, self._beat_advanced = "", None
        if attempt != self.attempt or clock - self._read > GAP_SECONDS:
            self.attempt, self.heartbeats, self.advanced = attempt, {}, {}
        self._read = clock
        heartbeats = {
            rank: reading
            for rank in heartbeat_ranks(folder, attempt)
            if (reading := read_heartbeat(folder.heartbeat(attempt, rank))) is not None
        }
        for rank, reading in heartbeats.items():
            if rank in self.heartbeats and self.heartbeats[rank].beats != reading.beats:
                self.advanced[rank] = clock
        self.heartbeats = heartbeats
        beat = read_text(str(folder.attempt(attempt) / "beat"))
        if self._beat and beat != self._beat:
            self._beat_advanced = clock
        self._beat = beat
        lease = read_lease(open_run_store(folder), attempt) or {}
        this = process_identity()
        same = (lease.get("boot"), lease.get("namespace")) == (this["boot"], this["namespace"])
        self.on_this_host = bool(this["boot"]) and same
        if self.on_this_host:
            started = lease.get("started")
            self.is_alive = bool(started) and process_start(int(lease["pid"])) == started
            self.is_alive |= any(reading.is_alive for reading in heartbeats.values())
        else:
            advanced = max([*self.advanced.values(), self._beat_advanced or 0.0])
            fresh = newest_record is not None and now - newest_record < FRESH_SECONDS
            self.is_alive = fresh or bool(advanced and clock - advanced < FRESH_SECONDS)


def heartbeat_ranks(folder: RunFolder, attempt: int) -> list[int]:
    """The ranks of an attempt that have a heartbeat file: the first MAX_RANKS."""
    return ranks_of_files(folder.attempt(attempt).as_posix(), r"heartbeat-([0-9]{5,7})")


def event_ranks(folder: RunFolder) -> list[int]:
    """The ranks that have an event file: the first MAX_RANKS."""
    found = ranks_of_files((folder.root / "events").as_posix(), r"rank-([0-9]{5,7})\.jsonl")
    # Of very many files, a part is listed: rank 0 is read in any case.
    return found if found[:1] == [0] or not folder.events(0).exists() else [0, *found]


def ranks_of_files(folder: str, pattern: str) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_NAMES)]
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(pattern, name)))[:MAX_RANKS]
