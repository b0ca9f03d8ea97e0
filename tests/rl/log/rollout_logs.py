"""Rollout logs that the tests write, and their content."""

from __future__ import annotations

from pathlib import Path

from meshwright.base.records.run_folder import RunFolder
from meshwright.rl.log.frames import RECORD_HEADER
from meshwright.rl.log.interface import DamagedRecord, LogPosition, LogRecord
from meshwright.rl.log.open_log import open_rollout_log, open_rollout_reader

RUN = "run-a"
PAYLOADS = [b"first" * 20, b"second" * 30, b"", b"fourth" * 40]


def open_log(root: Path, run_id: str = RUN, segment_bytes: int = 1 << 20):
    return open_rollout_log(RunFolder(root), run_id, segment_bytes)


def open_reader(root: Path, run_id: str = RUN):
    return open_rollout_reader(RunFolder(root), run_id)


def write_log(root: Path, payloads=PAYLOADS, run_id: str = RUN, segment_bytes: int = 1 << 20) -> list[LogPosition]:
    """A log with one append per payload."""
    root.mkdir(exist_ok=True)
    log = open_log(root, run_id, segment_bytes)
    positions = [log.append([payload])[0] for payload in payloads]
    log.close()
    return positions


def segment_file(root: Path, number: int = 1) -> Path:
    return root / "rollouts" / f"{number:08d}.log"


def payloads_of(log, start: LogPosition | None = None) -> list[bytes]:
    return [record.payload for record in log.scan(start) if isinstance(record, LogRecord)]


def damage_of(log, start: LogPosition | None = None) -> list[DamagedRecord]:
    return [record for record in log.scan(start) if isinstance(record, DamagedRecord)]


def record_bytes(payload: bytes) -> int:
    return RECORD_HEADER.size + len(payload)
