"""Why an attempt ended: who failed first, where, what it said, and what that means for the next attempt. Torch-free."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.data.sample_lookup import open_sample_lookup
from meshwright.errors import MeshwrightError
from meshwright.io import read_json, write_json
from meshwright.recover.failures import Failure
from meshwright.telemetry.heartbeat import HeartbeatReading, read_heartbeat
from meshwright.telemetry.run_folder import RunFolder

PHASES_WITHOUT_SAMPLES = ("start", "restore", "warmup", "update", "save", "evaluate", "end")
"""Phases in which a step's samples play no part."""


@dataclass(frozen=True)
class Incident:
    """One attempt's end, as `attempts/NNNN/incident.json` keeps it."""

    attempt: int
    outcome: str
    """complete, stopped, failed, hang, or lost (its supervisor died without a word)"""
    rank: int | None = None
    step: int | None = None
    phase: str = ""
    exit_code: int = 0
    error_type: str = ""
    message: str = ""
    log_tail: list[str] = field(default_factory=list)
    stack: str = ""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """where every rank was"""
    samples: list[int] = field(default_factory=list)
    """what the failing rank had in that step"""
    checkpoint: int = -1
    """steps done in the newest checkpoint when the attempt ended; -1 for none"""
    verdict: str = ""
    recommendation: str = ""

    @property
    def killed_externally(self) -> bool:
        """Whether somebody else ended the rank; an error, a hang or a crash are its own."""
        return self.outcome == "failed" and ("(SIGKILL)" in self.message or "(SIGTERM)" in self.message)

    def write(self, folder: RunFolder) -> None:
        write_json(folder.incident(self.attempt), dataclasses.asdict(self))


def read_incidents(folder: RunFolder) -> list[Incident]:
    """Every attempt's incident, oldest first; one that cannot be read is left out."""
    found = []
    for attempt in folder.attempts():
        if folder.incident(attempt).exists():
            try:
                found.append(Incident(**read_json(folder.incident(attempt))))
            except (MeshwrightError, TypeError):
                continue
    return found


def read_heartbeats(folder: RunFolder, attempt: int) -> dict[int, HeartbeatReading]:
    paths = [
        path for path in folder.attempt(attempt).glob("heartbeat-*") if re.fullmatch(r"heartbeat-[0-9]{5,9}", path.name)
    ]
    pages = {int(path.name.removeprefix("heartbeat-")): read_heartbeat(path) for path in sorted(paths)}
    return {rank: page for rank, page in pages.items() if page is not None}


def build_incident(
    folder: RunFolder, attempt: int, first: Failure, checkpoint: int, pages: dict[int, HeartbeatReading]
) -> Incident:
    """The incident of a failed attempt, from the failure to blame and from the pages that the ranks left."""
    page = pages.get(first.rank)
    step = page.step if page and page.step >= 0 else None
    phase = page.phase if page else "start"
    return Incident(
        attempt,
        "failed",
        first.rank if first.rank >= 0 else None,
        step,
        phase,
        first.exit_code,
        first.error_type,
        first.message,
        tail_lines(folder.log(attempt, first.rank)),
        first.traceback,
        [
            {"rank": rank, "where": reading.location, "collectives": reading.collective_count}
            for rank, reading in pages.items()
        ],
        samples_in_step(folder, step, first.rank) if step is not None and phase not in PHASES_WITHOUT_SAMPLES else [],
        checkpoint,
    )


def tail_lines(log: Path, count: int = 15) -> list[str]:
    try:
        with open(log, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def samples_in_step(folder: RunFolder, step: int, rank: int) -> list[int]:
    """What a rank had in a step, from the contract alone."""
    try:
        return [int(sample) for sample in open_sample_lookup(folder.root).show(step, rank)["samples"]]
    except (MeshwrightError, ValueError, KeyError):
        return []


def assign_verdict(incident: Incident, before: list[Incident]) -> Incident:
    """The verdict: what repeats is in the data or in the program, what wanders is in the machines."""
    failed = [old for old in before if old.outcome in ("failed", "hang")]
    # Who is killed from outside twice at one step may have been unlucky: that takes a third time, and samples that
    # could be the reason (one too large for the host's memory).
    needed = 2 if incident.killed_externally else 1
    same = failed[-needed:]
    again = len(same) == needed and all(
        old.step == incident.step and (old.step is not None or old.phase == incident.phase) for old in same
    )
    again = again and bool(incident.samples or not incident.killed_externally)
    if not again:
        verdict = "infrastructure" if any(old.step != incident.step for old in failed[-1:]) else "first of its kind"
        move = "the job restarts from the newest checkpoint"
    elif incident.samples and all(old.samples == incident.samples for old in same):
        verdict = "data-dependent"
        move = f"look at samples {format_samples(incident.samples)} with `meshwright data find`"
    else:
        verdict = "deterministic"
        move = f"the program fails in {incident.phase} of step {incident.step} whatever the data: look at the stack"
    return dataclasses.replace(incident, verdict=verdict, recommendation=move)


def format_samples(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:16])) + (f" and {len(samples) - 16} more" if len(samples) > 16 else "")
