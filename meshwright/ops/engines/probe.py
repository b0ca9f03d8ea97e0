"""Liveness of the ranks of this host, for probes of an engine: exits with 1 if a rank makes no progress. Torch-free.

`python -P -m meshwright.ops.engines.probe RUN --limit SECONDS` reads the heartbeats of the newest attempt. Ranks of
other hosts do not count, nor does a host without ranks: a spare, or a supervisor between two attempts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.base.io import read_json, write_json
from meshwright.base.records.heartbeat import HeartbeatReading, read_heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import MeshwrightError


def ranks_of_this_host(folder: RunFolder) -> dict[str, HeartbeatReading]:
    """The heartbeats whose process runs here: a process is identified by its number and its start, in kernel ticks."""
    readings = {}
    for path in sorted(folder.attempt(folder.last_attempt()).glob("heartbeat-*")):
        reading = read_heartbeat(path)
        if reading is not None and reading.is_alive:
            readings[path.name] = reading
    return readings


def check(beats: Mapping[str, Any], seen: Mapping[str, Any], now: float) -> dict[str, Any]:
    """For every rank its beats, and since when (monotonic seconds) it has that many."""
    state = {}
    for rank, count in beats.items():
        earlier = seen.get(rank)
        unchanged = isinstance(earlier, dict) and earlier.get("beats") == count
        since = earlier.get("since") if unchanged and isinstance(earlier, dict) else None
        state[rank] = {"beats": count, "since": since if isinstance(since, int | float) and since <= now else now}
    return state


def state_file(run: Path) -> Path:
    """Where a probe keeps what it saw, for the next one; on this host, and only for this user."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(run))).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"meshwright-probe-{os.getuid()}" / f"{name}.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="probe", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds without progress")
    args = parser.parse_args(argv)
    readings = ranks_of_this_host(RunFolder(args.run))
    file = state_file(args.run)
    seen: Any = {}
    with suppress(MeshwrightError):
        seen = read_json(file)
    beats = {rank: f"{reading.pid}/{reading.beats}" for rank, reading in readings.items()}
    now = time.monotonic()
    state = check(beats, seen if isinstance(seen, dict) else {}, now)
    with suppress(OSError):  # a read-only file system: a probe must not end a job that trains
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_json(file, state)
    # A rank that waits for another one is not the cause: the host of the other one finds it.
    stuck = [rank for rank, entry in state.items() if now - entry["since"] > args.limit and not readings[rank].waiting]
    for rank in stuck:
        print(f"{rank}: no progress for {now - state[rank]['since']:.0f} s, {readings[rank].location}", file=sys.stderr)
    return 1 if stuck else 0


if __name__ == "__main__":
    raise SystemExit(main())
