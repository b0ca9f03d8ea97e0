"""The session of a user with incidents: at most one is open, and progress records what was answered. Torch-free."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import randbelow
from typing import Any

from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import printable
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import BusyError, ConfigError, MeshwrightError
from meshwright.insight.diagnose.finding import Finding
from meshwright_practice.incidents.answer import IncidentAnswer
from meshwright_practice.incidents.catalogue import CLASSES
from meshwright_practice.incidents.evidence import find_causes, printed_lines
from meshwright_practice.incidents.incident import (
    DEFAULT_STEPS,
    MAX_SEED,
    PracticeIncident,
    draw_incident,
    read_seal,
    write_seal,
)
from meshwright_practice.incidents.job import (
    RUN_FOLDER,
    JobState,
    create_folder,
    incident_folder,
    incidents_home,
    integer,
    read_job,
    start_job,
    stop_job,
)
from meshwright_practice.incidents.scoring import IncidentScore, score_answer
from meshwright_practice.incidents.story import Story, save_story, tell_story
from meshwright_practice.progress import PracticeProgress, load_progress, progress_file, save_progress

LOCK_FILE = ".lock"
MAX_SHOWN_NAME = 40
KEPT_RUNS = 5
"""Closed incidents whose run folders are kept."""
HISTORY = "try meshwright practice incident --list"


@dataclass(frozen=True)
class OpenIncident:
    """The incident that a user works on."""

    name: str
    folder: Path
    incident: PracticeIncident
    job: JobState
    hints: int
    started: float

    @property
    def run(self) -> Path:
        return self.folder / RUN_FOLDER

    @property
    def seconds(self) -> float:
        """The time since the pager rang. A clock that was set back does not give points."""
        return max(0.0, time.time() - self.started)

    def history(self) -> RunHistory | None:
        with suppress(MeshwrightError, OSError):
            return RunHistory(RunFolder(self.run))
        return None


@dataclass(frozen=True)
class ClosedIncident:
    """An incident that was answered or given up."""

    name: str
    story: Story
    score: IncidentScore | None


class IncidentSession:
    """The incidents of this user. `notes` collects what went wrong with earlier ones, to be shown to the user."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.progress: PracticeProgress = load_progress(progress_file(), self.notes.append)

    def start(self, seed: int | None = None, name: str | None = None, steps: int = DEFAULT_STEPS) -> OpenIncident:
        """Draws an incident and starts its job. Only one can be open."""
        drawn = draw_incident(randbelow(MAX_SEED) if seed is None else seed, CLASSES, name, steps)
        with exclusive_session():
            self.progress = load_progress(progress_file(), self.notes.append)
            self.close_lost()
            if (other := self.find_open()) is not None:
                raise BusyError(
                    f"incident {other.name} is open, and {other.job.sentence}",
                    "try --answer, --hint, or --story, which gives it up",
                )
            self.delete_old_runs()
            folder = create_folder()
            try:
                write_seal(folder, drawn)
                job = start_job(folder)
            except OSError as error:
                raise ConfigError(
                    f"the incident cannot be written to {folder}: {error.strerror}", "try to free space on the disk"
                ) from None
            self.record(folder.name, {"state": "open", "started": job.started or time.time(), "hints": 0})
        return self.require_open()

    def find_open(self) -> OpenIncident | None:
        """The open incident, if there is one. Its folder is valid: `close_lost` comes first."""
        for name, entry in sorted(self.progress.incidents.items(), reverse=True):
            if isinstance(entry, dict) and entry.get("state") == "open" and is_incident_name(name):
                folder = incident_folder(name)
                job = read_job(folder)
                if job.status == "missing":
                    continue
                started = entry.get("started")
                if not isinstance(started, int | float) or not math.isfinite(started):
                    started = job.started
                hints = min(len(CLASSES), max(0, integer(entry.get("hints"))))
                incident = read_seal(folder, CLASSES)
                return OpenIncident(name, folder, incident, job, hints, float(started))
        return None

    def close_lost(self) -> None:
        """Closes the incidents whose folder is gone or damaged, and says so."""
        for name, entry in list(self.progress.incidents.items()):
            if not (isinstance(entry, dict) and entry.get("state") == "open"):
                continue
            if is_incident_name(name):
                folder = incident_folder(name)
                try:
                    if read_job(folder).status != "missing":
                        read_seal(folder, CLASSES)
                        continue
                    reason = f"its folder {folder} is gone"
                except ConfigError as error:
                    reason = error.message
                stop_job(folder)
            else:
                reason = f"{progress_file()} gives it a name that is not a number"
            shown = printable(name[:MAX_SHOWN_NAME])
            self.notes.append(f"incident {shown} cannot be answered any more and is closed: {reason}")
            self.record(name, {**entry, "state": "lost"})

    def delete_old_runs(self) -> None:
        """Deletes the run folders of old incidents; their scores and stories stay."""
        closed = [
            row["incident"] for row in self.rows() if row.get("state") != "open" and is_incident_name(row["incident"])
        ]
        for name in closed[:-KEPT_RUNS]:
            shutil.rmtree(incident_folder(name) / RUN_FOLDER, ignore_errors=True)

    def require_open(self) -> OpenIncident:
        self.close_lost()
        found = self.find_open()
        if found is None:
            raise ConfigError("no incident is open", "try meshwright practice incident, which starts one")
        return found

    def require_fault(self) -> OpenIncident:
        """The open incident, if its fault has happened, or never will because the job has ended."""
        current = self.require_open()
        if current.job.status == "running" and not fault_has_happened(current.incident, current.history()):
            raise ConfigError(
                f"the fault of incident {current.name} has not happened yet, and the answer is not scored",
                f"try meshwright diagnose {current.run}, and answer when it shows the fault",
            )
        return current

    def answer(self, answer: IncidentAnswer) -> ClosedIncident:
        """Stops the job, scores the answer and closes the incident."""
        current = self.require_fault()
        seconds = current.seconds
        findings = self.diagnose_and_stop(current)
        lines = printed_lines(current.folder, findings)
        score = score_answer(answer, current.incident, current.history(), lines, seconds, current.hints)
        self.close(current, "answered", score)
        return self.finish(current, findings, score)

    def hint(self) -> tuple[OpenIncident, str]:
        """The next hint, which costs points."""
        current = self.require_open()
        hints = current.incident.kind.hints
        if current.hints >= len(hints):
            raise ConfigError(
                f"incident {current.name} has no more hints", "try --answer, or --story, which gives it up"
            )
        self.record(current.name, {"state": "open", "started": current.started, "hints": current.hints + 1})
        return current, current.incident.text(hints[current.hints])

    def give_up(self) -> ClosedIncident:
        """Stops the job and closes the incident without a score."""
        current = self.require_open()
        findings = self.diagnose_and_stop(current)
        self.close(current, "given up", None)
        return self.finish(current, findings, None)

    def diagnose_and_stop(self, current: OpenIncident) -> list[Finding]:
        """What `diagnose` says about the run as the user saw it: a run that was stopped no longer hangs."""
        findings = find_causes(current.folder)
        stop_job(current.folder)
        return findings

    def finish(self, current: OpenIncident, findings: list[Finding], score: IncidentScore | None) -> ClosedIncident:
        story = tell_story(current.incident, current.folder, findings)
        save_story(story, current.folder)
        return ClosedIncident(current.name, story, score)

    def stop(self) -> OpenIncident:
        """Stops the job. The incident stays open: its records can be read, and it can be answered."""
        current = self.require_open()
        stop_job(current.folder)
        return self.require_open()

    def newest_closed(self) -> ClosedIncident:
        """The newest incident that has ended, for another look at its story."""
        for name, entry in sorted(self.progress.incidents.items(), reverse=True):
            if isinstance(entry, dict) and entry.get("state") in ("answered", "given up") and is_incident_name(name):
                folder = incident_folder(name)
                return ClosedIncident(name, tell_story(read_seal(folder, CLASSES), folder, find_causes(folder)), None)
        raise ConfigError("no incident has been answered", "try meshwright practice incident, which starts one")

    def close(self, current: OpenIncident, state: str, score: IncidentScore | None) -> None:
        entry: dict[str, Any] = {
            "state": state,
            "started": current.started,
            "seconds": round(current.seconds if score is None else score.seconds, 1),
            "seed": current.incident.seed,
            "class": current.incident.kind.name,
            "hints": current.hints,
        }
        if score is not None:
            entry |= {"score": score.total, "truth": score.truth}
            entry["fields"] = {field.field: field.points for field in score.fields}
        self.record(current.name, entry)

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Writes the state of an incident. Other commands may have changed other parts of the progress meanwhile."""
        self.progress = load_progress(progress_file(), self.notes.append)
        self.progress.incidents[name] = entry
        try:
            save_progress(self.progress, progress_file())
        except OSError as error:
            raise ConfigError(
                f"{progress_file()} cannot be written: {error.strerror}",
                "try to free space, or another MESHWRIGHT_HOME",
            ) from None

    def rows(self) -> list[dict[str, Any]]:
        """The history of all incidents, oldest first. An open one does not tell its class."""
        entries = sorted(self.progress.incidents.items())
        return [{**entry, "incident": name} for name, entry in entries if isinstance(entry, dict)]


def fault_has_happened(incident: PracticeIncident, history: RunHistory | None) -> bool:
    """Whether the records have reached the step of the fault; a rank that hangs does not record that step itself."""
    if history is None or not len(recorded := history.steps().step):
        return False
    window = incident.step_window(history)
    return window is None or int(recorded.max()) + 1 >= window[0]


def is_incident_name(name: str) -> bool:
    """Whether a name from the progress file is one that `create_folder` gives. No other name becomes a path."""
    return name.isascii() and name.isdigit() and len(name) == 4


@contextmanager
def exclusive_session() -> Iterator[None]:
    """Lets one command at a time start an incident."""
    home = incidents_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{home} cannot be created or written: {error.strerror}",
            "try to set MESHWRIGHT_HOME to a folder that is writable and has space",
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError("another command is starting an incident", HISTORY) from None
        yield
    finally:
        os.close(lock)
