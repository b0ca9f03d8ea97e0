"""The rollout log against an fsynced file and SQLite: records per second that become durable, and that are read again.

All append the same records in groups of 1, 8 and 64, and make every group durable before the next: the rollout log with
one fsync, the fsynced file with one write and one fsync, SQLite with one transaction (WAL, synchronous=FULL). They
alternate, so that all see the same load of the machine. An fsynced file has no checksums and no positions: it is the
limit of the disk. Records are read from the page cache, in order and at random positions.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.rl.log.interface import LogRecord
from meshwright.rl.log.posix_log import PosixRolloutLog

RECORD_BYTES = 16_000
"""About that of a group of 8 rollouts with 64 tokens each, and their log-probabilities. As with those, records do not
begin at pages of the file.
"""
GROUPS = (1, 8, 64)
APPENDS = {1: 48, 8: 24, 64: 12}
"""Appends per round, by the number of records in each."""
ROUNDS = 9
SEGMENT_BYTES = 64 << 20
LOG, PLAIN, SQLITE = "rollout log", "fsynced file", "sqlite3, WAL, synchronous=FULL"
MIN_RATIO_TO_PLAIN, MIN_RATIO_TO_SQLITE = 0.8, 1.0
"""Targets of appends: at most a fifth below the disk itself, and not below SQLite."""


class FsyncedFile:
    """Records of one size in a file without headers."""

    def __init__(self, folder: Path) -> None:
        self.file = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.count = 0

    def append(self, payloads: list[bytes]) -> list[int]:
        os.writev(self.file, payloads)
        os.fsync(self.file)
        self.count += len(payloads)
        return list(range(self.count - len(payloads), self.count))

    def read(self, position: int) -> bytes:
        return os.pread(self.file, RECORD_BYTES, position * RECORD_BYTES)

    def read_all(self) -> int:
        return sum(len(self.read(position)) == RECORD_BYTES for position in range(self.count))

    def close(self) -> None:
        os.close(self.file)


class SqliteTable:
    """Records as rows of a table."""

    def __init__(self, folder: Path) -> None:
        self.connection = sqlite3.connect(folder / "table.db", isolation_level=None)
        self.connection.execute("pragma journal_mode = wal")
        self.connection.execute("pragma synchronous = full")
        self.connection.execute("create table records (id integer primary key, payload blob)")
        self.count = 0

    def append(self, payloads: list[bytes]) -> list[int]:
        first = self.count + 1
        rows = list(enumerate(payloads, first))
        self.connection.execute("begin")
        self.connection.executemany("insert into records values (?, ?)", rows)
        self.connection.execute("commit")
        self.count += len(payloads)
        return list(range(first, self.count + 1))

    def read(self, position: int) -> bytes:
        row = self.connection.execute("select payload from records where id = ?", (position,)).fetchone()
        payload: bytes = row[0]
        return payload

    def read_all(self) -> int:
        rows = self.connection.execute("select payload from records order by id")
        return sum(len(payload) == RECORD_BYTES for (payload,) in rows)

    def close(self) -> None:
        self.connection.close()


class MeasuredLog(PosixRolloutLog):
    """The rollout log, with the calls that the peers have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "rollouts", "benchmark", SEGMENT_BYTES)

    def read_all(self) -> int:
        return sum(isinstance(record, LogRecord) for record in self.scan())


WRITERS: dict[str, Callable[[Path], Any]] = {LOG: MeasuredLog, PLAIN: FsyncedFile, SQLITE: SqliteTable}


def measure() -> dict[str, Any]:
    """Rates of every writer and ratios of the rollout log to each peer, by the number of records per append."""
    result: dict[str, Any] = {"record_bytes": RECORD_BYTES, "rounds": ROUNDS, "append": {}, "read": {}}
    for group in GROUPS:
        rounds = [measure_round(group, number) for number in range(ROUNDS + 1)][1:]  # the first one warms up
        appends = {name: [row[name]["append"] for row in rounds] for name in WRITERS}
        result["append"][group] = summarize(appends, APPENDS[group] * group)
        print(f"rollout_log, group of {group}: {json.dumps(result['append'][group])}", file=sys.stderr, flush=True)
    records = APPENDS[GROUPS[-1]] * GROUPS[-1]
    for order in ("sequential", "random"):
        result["read"][order] = summarize({name: [row[name][order] for row in rounds] for name in WRITERS}, records)
    print(f"rollout_log, read: {json.dumps(result['read'])}", file=sys.stderr, flush=True)
    return result


def measure_round(group: int, number: int) -> dict[str, dict[str, float]]:
    """Seconds of the appends and of reading all records again, by writer. Appends alternate one by one."""
    chance = random.Random(number)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        writers = {}
        for writer, create in WRITERS.items():
            folder = Path(name) / str(len(writers))
            folder.mkdir()
            writers[writer] = create(folder)
            writers[writer].append([bytes(RECORD_BYTES)])  # creates the files
        seconds = {writer: {"append": 0.0} for writer in writers}
        positions: dict[str, list[Any]] = {writer: [] for writer in writers}
        for append in range(APPENDS[group]):
            payloads = [chance.randbytes(RECORD_BYTES) for _ in range(group)]
            order = list(writers)
            for writer in order[append % 3 :] + order[: append % 3]:
                start = time.perf_counter()
                positions[writer] += writers[writer].append(payloads)
                seconds[writer]["append"] += time.perf_counter() - start
        shuffled = chance.sample(range(APPENDS[group] * group), APPENDS[group] * group)
        for writer, opened in writers.items():
            start = time.perf_counter()
            count = opened.read_all()
            seconds[writer]["sequential"] = time.perf_counter() - start
            start = time.perf_counter()
            count += sum(len(opened.read(positions[writer][index])) == RECORD_BYTES for index in shuffled)
            seconds[writer]["random"] = time.perf_counter() - start
            opened.close()
            if count != 2 * len(shuffled) + 1:
                raise RuntimeError(f"{writer}: {count} records were read, not {2 * len(shuffled) + 1}")
    return seconds


def summarize(seconds: dict[str, list[float]], records: int) -> dict[str, Any]:
    """Rates of each writer, and the rate of the rollout log divided by that of each peer in the same round."""
    rates = {name: records / statistics.median(values) for name, values in seconds.items()}
    ratios = {}
    for peer in (PLAIN, SQLITE):
        values = [theirs / own for theirs, own in zip(seconds[peer], seconds[LOG], strict=True)]
        low, median, high = statistics.quantiles(values, n=4)
        ratios[peer] = {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}
    return {
        "records_per_second": {name: round(rate) for name, rate in rates.items()},
        "megabytes_per_second": {name: round(rate * RECORD_BYTES / 1e6, 1) for name, rate in rates.items()},
        "ratio_to": ratios,
    }
