"""Incidents: why an attempt ended, and the verdict that decides whether another attempt can help. Torch-free."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.io import open_regular_file, read_json, write_json
from meshwright.base.records.failures import FINAL_EXIT_CODES, HOST_LOST, Failure
from meshwright.base.records.heartbeat import HeartbeatReading, read_heartbeat
from meshwright.base.records.phases import PHASES, STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import MeshwrightError, PeerError

PHASES_WITHOUT_SAMPLES = tuple(phase for phase in PHASES if phase not in STEP_PHASES or phase == "update")
"""Phases whose outcome does not depend on the samples of the step."""
SamplesInStep = Callable[[RunFolder, int, int], list[int]]
"""Run folder, step and rank -> the ids of the samples that the rank trained on in the step."""
NO_SAMPLES: SamplesInStep = lambda *_: []  # noqa: E731
"""Of a program whose stream is not known."""

MISMATCH = re.compile(
    r"ranks entered different collectives|mismatch between collectives|distributed collective mismatch"
    r"|op\.preamble\.length <= op\.nbytes"
)
"""What the watchdog, torch and Gloo write when ranks have entered different collectives."""


@dataclass(frozen=True)
class Incident:
    """How one attempt ended; stored as `attempts/NNNN/incident.json`."""

    attempt: int
    outcome: str
    """complete, stopped, failed, hang, resized (the next attempt uses more hosts), or lost (the supervisor was killed
    and wrote nothing).
    """
    rank: int | None = None
    step: int | None = None
    phase: str = ""
    exit_code: int = 0
    error_type: str = ""
    message: str = ""
    log_tail: list[str] = field(default_factory=list)
    """The last lines that the failing rank printed."""
    stack: str = ""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """The location of every rank: step, phase, pending collective, and the number of collectives entered."""
    samples: list[int] = field(default_factory=list)
    """The sample ids of the failing rank in that step."""
    checkpoint_step: int = -1
    """The step of the newest checkpoint when the attempt ended; -1 if there is none."""
    verdict: str = ""
    recommendation: str = ""
    host: str = ""
    """The host of the failing rank, in a job on several hosts."""
    signal: int = 0
    """The signal that had asked the job to stop when the attempt failed: no other host continues it; 0 if none."""
    gave_up: int = 0
    """The exit code of a job that ended with this failure because another attempt cannot help; 0 if it went on."""

    @property
    def when(self) -> str:
        """The step in words: `at step 20`, or `before the first step`."""
        return f"at step {self.step}" if self.step is not None else "before the first step"

    @property
    def mismatch(self) -> str:
        """What the message or the log of a failure says of ranks that entered different collectives, or ''. Whatever
        then ended the attempt is a consequence.
        """
        lines = (self.message, *self.log_tail) if self.outcome in ("failed", "hang") else ()
        return next(filter(MISMATCH.search, lines), "")

    @property
    def killed_externally(self) -> bool:
        """Whether another process (a user, the OOM killer, a scheduler) killed the rank."""
        killed = "(SIGKILL)" in self.message or "(SIGTERM)" in self.message
        return self.outcome == "failed" and killed and not self.mismatch

    @property
    def lost_peer(self) -> bool:
        """Whether a host was lost, or ranks could only say that they had lost others: neither the program nor the data
        is the cause, wherever it happens.
        """
        return self.outcome == "failed" and self.error_type in (HOST_LOST, PeerError.__name__)

    @property
    def ends_job(self) -> bool:
        """Whether no further attempt of the job follows: it is complete, was stopped, or would fail again."""
        ended = self.outcome in ("complete", "stopped") or bool(self.signal or self.gave_up)
        return ended or self.exit_code in FINAL_EXIT_CODES

    @property
    def job_exit_code(self) -> int:
        """The exit code of the job, if it ends with this attempt."""
        return 128 + self.signal if self.signal else self.gave_up or self.exit_code

    def write(self, folder: RunFolder) -> None:
        """Writes the incident; on a full disk the outcome is still reported to the user."""
        with suppress(OSError):
            write_json(folder.incident(self.attempt), dataclasses.asdict(self))


def read_incidents(folder: RunFolder) -> list[Incident]:
    """The incident of every attempt, oldest first; unreadable files are skipped."""
    incidents = []
    for attempt in folder.attempts():
        if folder.incident(attempt).exists():
            try:
                incidents.append(Incident(**read_json(folder.incident(attempt))))
            except (MeshwrightError, TypeError):
                continue
    return incidents


def read_heartbeats(folder: RunFolder, attempt: int) -> dict[int, HeartbeatReading]:
    """The last heartbeat of every rank of an attempt."""
    paths = [
        path for path in folder.attempt(attempt).glob("heartbeat-*") if re.fullmatch(r"heartbeat-[0-9]{5,9}", path.name)
    ]
    readings = {int(path.name.removeprefix("heartbeat-")): read_heartbeat(path) for path in sorted(paths)}
    return {rank: reading for rank, reading in readings.items() if reading is not None}


def build_incident(
    folder: RunFolder,
    attempt: int,
    cause: Failure,
    checkpoint_step: int,
    heartbeats: dict[int, HeartbeatReading],
    samples_in_step: SamplesInStep = NO_SAMPLES,
) -> Incident:
    """The incident of a failed attempt, from the root cause and from the last heartbeats of the ranks."""
    heartbeat = heartbeats.get(cause.rank)
    step = heartbeat.step if heartbeat and heartbeat.step >= 0 else None
    phase = heartbeat.phase if heartbeat else "start"
    return Incident(
        attempt,
        "failed",
        cause.rank if cause.rank >= 0 else None,
        step,
        phase,
        cause.exit_code,
        cause.error_type,
        cause.message,
        tail_lines(folder.log(attempt, cause.rank)),
        cause.traceback,
        [
            {"rank": rank, "location": reading.location, "collectives": reading.collective_count}
            for rank, reading in heartbeats.items()
        ],
        samples_in_step(folder, step, cause.rank) if step is not None and phase not in PHASES_WITHOUT_SAMPLES else [],
        checkpoint_step,
        host=cause.host,
    )


def tail_lines(log: Path, count: int = 15) -> list[str]:
    """The last lines of a log file."""
    try:
        with open_regular_file(log) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def assign_verdict(incident: Incident, history: list[Incident]) -> Incident:
    """Decides what an incident means: a failure that repeats at one step comes from the data or the program, failures
    at changing steps come from the infrastructure.
    """
    failed = [previous for previous in history if previous.outcome in ("failed", "hang")]
    # Two external kills at one step may be a coincidence. The third one counts, if the samples can be the reason (a
    # sample that is too large for the host's memory, for example).
    needed = 2 if incident.killed_externally else 1
    previous_failures = failed[-needed:]
    repeated = len(previous_failures) == needed and all(
        is_same_place(previous, incident) for previous in previous_failures
    )
    repeated = repeated and bool(incident.samples or not incident.killed_externally) and not incident.lost_peer
    if not repeated:
        verdict = (
            "infrastructure"
            if any(previous.step != incident.step for previous in failed[-1:]) and not incident.mismatch
            else "first failure"
        )
        recommendation = (
            "repeat the command after the error is corrected"
            if incident.exit_code in FINAL_EXIT_CODES
            else "the job restarts from the newest checkpoint"
        )
    elif incident.samples and all(previous.samples == incident.samples for previous in previous_failures):
        verdict = "data-dependent"
        recommendation = f"inspect samples {format_samples(incident.samples)} with `meshwright data find`"
    else:
        verdict = "deterministic"
        recommendation = f"the {incident.phase} phase {incident.when} fails whatever the samples are: see the traceback"
    return dataclasses.replace(incident, verdict=verdict, recommendation=recommendation)


def is_same_place(one: Incident, other: Incident) -> bool:
    """Whether two attempts failed in the same step, or in the same phase outside of a step. A rank that fails while it
    restores the checkpoint of a step has not reached that step.
    """
    places = ["step" if incident.phase in STEP_PHASES else incident.phase for incident in (one, other)]
    return one.step == other.step and places[0] == places[1]


def format_samples(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:16])) + (f" and {len(samples) - 16} more" if len(samples) > 16 else "")
