"""Replays one's own finished runs: the error of their predictions before and after corrections; torch-free.

Every finished run has its prediction without corrections and its measurement in its events, as in the calibration log.
A run is corrected by the other runs of the same host and device, never by itself. Run folders are untrusted: a bounded
number of them is read, and of each the end of the events of rank 0.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.base.io import open_regular_file
from meshwright.base.records.run_folder import require_kind
from meshwright.base.records.untrusted_records import unix_time
from meshwright.errors import ConfigError
from meshwright.planner.calibration.calibration_log import (
    CalibrationRecord,
    correction_factor,
    parse_record,
    quantile,
)

EVENTS = Path("events") / "rank-00000.jsonl"
"""the events of rank 0 in a run folder"""
MAX_ENTRIES = 4096
"""Entries of the folder that are looked at."""
MAX_RUNS = 512
"""Runs that are replayed; the others are left out."""
MAX_EVENT_BYTES = 1 << 20
"""Bytes at the end of a run's events that are read: the calibration is one of the last events."""
EVENT_KEYS = ("kind", "attempt", "rank", "time", "steps")
"""Keys of the event that are not part of the calibration record."""
FIGURES = ("seconds", "memory")


@dataclass(frozen=True)
class OwnRun:
    """A finished run of the folder."""

    name: str
    record: CalibrationRecord
    time: float
    """when it ended, in Unix seconds"""

    @property
    def machine(self) -> tuple[str, str]:
        return self.record.host, self.record.signature.device

    def has_same_machine(self, other: OwnRun) -> bool:
        """Whether both ran on one host and device; a run that does not name its host was on none that is known."""
        return bool(self.record.host) and self.machine == other.machine


def replay_own_runs(folder: Path) -> dict[str, Any]:
    """Returns the error of every run of a folder and of all of them, before and after corrections.

    Args:
        folder: a folder of run folders.
    """
    runs, left_out, is_complete = read_runs(folder)
    if not runs:
        read = "" if is_complete else f" among its first {MAX_ENTRIES:,} entries"
        raise ConfigError(
            f"no finished run of {folder}{read} has a prediction to compare",
            "expected run folders of `meshwright train` with at least ten timed steps on a measured machine "
            "(meshwright plan measure)",
        )
    records = [replay_run(run, runs) for run in runs]
    cut = f"the folder has more than {MAX_ENTRIES:,} entries, and the others are not read"
    return {
        "folder": str(folder),
        "machines": len({run.machine for run in runs}),
        "records": records,
        "scores": [score(figure, records) for figure in FIGURES],
        "left_out": left_out,
        "notes": [] if is_complete else [cut],
    }


def read_runs(folder: Path) -> tuple[list[OwnRun], list[dict[str, str]], bool]:
    """Reads the run folders in a folder. A copy of a run is left out: it would correct itself.

    Returns the runs, the reason for each one that is left out, and whether all entries of the folder were read.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES) if entry.is_dir(follow_symlinks=False))
            is_complete = next(entries, None) is None
    except OSError as error:
        raise ConfigError(f"--replay {folder}: {error.strerror}", "expected a folder of run folders") from None
    runs: list[OwnRun] = []
    left_out = []
    for name in names:
        run = read_run(folder, name)
        if isinstance(run, str):
            left_out.append({"id": name, "reason": run})
        elif len(runs) >= MAX_RUNS:
            left_out.append({"id": name, "reason": f"more than {MAX_RUNS} runs"})
        elif copy := next((other for other in runs if (other.record, other.time) == (run.record, run.time)), None):
            left_out.append({"id": name, "reason": f"a copy of {copy.name}"})
        else:
            runs.append(run)
    return runs, left_out, is_complete


def read_run(folder: Path, name: str) -> OwnRun | str:
    """Returns a finished run, or the reason why it is left out."""
    try:
        require_kind((folder / name / EVENTS).parent, stat.S_ISDIR, "a folder")
        with open_regular_file(folder / name / EVENTS) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_EVENT_BYTES))
            lines = file.read(MAX_EVENT_BYTES).split(b"\n")
    except (OSError, ConfigError):
        return "no run folder"
    for line in reversed(lines):
        if b'"calibrated"' not in line:
            continue
        try:
            event = json.loads(line)
            if event["kind"] == "calibrated":
                record = parse_record({key: value for key, value in event.items() if key not in EVENT_KEYS})
                time = unix_time(event.get("time"))
                return "its calibration event is damaged" if time is None else OwnRun(name, record, time)
        except (ValueError, RecursionError, TypeError, KeyError, ConfigError):
            return "its calibration event is damaged"
    return "not finished, too short, or on a machine that was not measured"


def replay_run(run: OwnRun, runs: Sequence[OwnRun]) -> dict[str, Any]:
    """Returns the predictions of a run before and after it is corrected by the other runs of its machine."""
    others = [other.record for other in runs if other is not run and run.has_same_machine(other)]
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    for figure in FIGURES:
        ratio = run.record.ratio(figure)
        if ratio is None:
            continue
        factor = correction_factor(run.record.signature, others, figure)
        predicted = getattr(run.record, f"predicted_{figure}")
        figures[figure] = {
            "measured": getattr(run.record, f"measured_{figure}"),
            "predicted": predicted,
            "corrected": predicted * factor.ratio,
            "factor": factor.ratio,
            "runs": factor.runs,
            "error": 1 / ratio - 1,
            "corrected_error": factor.ratio / ratio - 1,
        }
    host, device = run.machine
    return {"id": run.name, "model": run.record.model, "host": host, "device": device, **figures}


def score(figure: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and the 90th percentile of a figure's absolute errors before and after corrections."""
    rows = [record[figure] for record in records if record[figure] is not None]
    result: dict[str, Any] = {
        "figure": figure,
        "runs": len(rows),
        "corrected_runs": sum(row["runs"] > 0 for row in rows),
    }
    for key, source in (("before", "error"), ("after", "corrected_error")):
        errors = [abs(row[source]) for row in rows]
        weights = [1.0] * len(errors)
        result[key] = {
            name: quantile(errors, weights, fraction) if errors else None
            for name, fraction in (("median", 0.5), ("percentile_90", 0.9))
        }
    return result
