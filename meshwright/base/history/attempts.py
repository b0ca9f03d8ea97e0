"""The attempts of a run: when each started and ended, with which steps, and why it ended. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.base.history.clean_events import clean_incident
from meshwright.base.io import read_json
from meshwright.base.records.events import Event
from meshwright.base.records.incidents import Incident
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.untrusted_records import natural_number, unix_time
from meshwright.errors import MeshwrightError

FAILURES = ("failed", "hang", "lost")
"""The outcomes after which a job continues from its newest checkpoint, if at all."""
MAX_ATTEMPTS = 4096
"""The attempts that are kept: the newest."""


@dataclass
class AttemptHistory:
    """One attempt: from its lease, or the start of the command, to the end of its last rank."""

    number: int
    restart: int = 0
    """how many times the job was restarted before"""
    command_started: float | None = None
    """when the command that trains was started, if this is its first attempt"""
    supervisor_started: float | None = None
    """when the supervisor began to start the ranks"""
    supervisor_ended: float | None = None
    """when the supervisor saw the last rank end"""
    command_ended: float | None = None
    """when the command had nothing left to do, if this was its last attempt"""
    first_record: float | None = None
    last_record: float | None = None
    """the times of the first and last record of the attempt"""
    start: Event = field(default_factory=dict)
    """the start record of rank 0; empty if there is none"""
    restored: Event | None = None
    choices: str = ""
    """the attention backend and the compile scope of rank 0, in one line; empty on CPU"""
    end: Event | None = None
    """the end record of rank 0"""
    steps_recorded: tuple[int, int] | None = None
    """the first and the last step that rank 0 has recorded"""
    incident: Incident | None = None
    is_newest: bool = True
    is_alive: bool = False

    @property
    def started(self) -> float | None:
        """When the attempt began, in Unix seconds."""
        known = [time for time in (self.command_started, self.supervisor_started) if time is not None]
        process = unix_time(self.start.get("process_started"))  # torchrun has started it
        return min(known, default=self.first_record if process is None else process)

    @property
    def ended(self) -> float | None:
        """When the last rank ended, in Unix seconds, or the command whose last attempt this was; None while the attempt
        runs. Of an attempt whose supervisor was killed, or whose ranks torchrun supervised, only the last record is
        known.
        """
        known = [time for time in (self.supervisor_ended, self.command_ended) if time is not None]
        if known:
            return max(known)
        return None if self.outcome == "running" else self.last_record

    @property
    def first_step(self) -> int:
        """The first step that the attempt ran, or was to run."""
        if self.restored is not None:
            return int(self.restored["step"])
        return self.steps_recorded[0] if self.steps_recorded else 0

    @property
    def done(self) -> int:
        """The number of completed steps of the run when the attempt ended."""
        return self.steps_recorded[1] + 1 if self.steps_recorded else self.first_step

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 before the start record."""
        ranks = self.start.get("ranks")
        return ranks if type(ranks) is int and 0 < ranks < 1 << 24 else 0

    @property
    def outcome(self) -> str:
        """running, complete, stopped, failed, hang, or lost: nothing recorded why the attempt ended."""
        if self.incident is not None:
            return self.incident.outcome
        if self.end is not None:
            return "stopped" if self.end["stopped"] else "complete"
        return "running" if self.is_alive and self.is_newest and self.supervisor_ended is None else "lost"

    def read_incident(self, folder: RunFolder) -> None:
        """Reads why the attempt ended, once it is on record."""
        path = folder.incident(self.number)
        if self.incident is None and path.exists():
            try:
                self.incident = clean_incident(read_json(path), self.number)
            except MeshwrightError:
                return

    def receive(self, event: Event) -> None:
        """Takes a record of rank 0 or of the supervisor."""
        match event["kind"]:
            case "attempt_start":
                self.supervisor_started = event["time"]
                self.restart, self.command_started = max(0, event["restart"]), event["command_started"]
            case "attempt_end":
                self.supervisor_ended = event["time"]
            case "command_end":
                self.command_ended = event["time"]
            case "restored":
                self.restored = event
            case "choices":
                self.choices = event["summary"] or ""
            case "end":
                self.end = event

    def receive_start(self, start: Event) -> None:
        """Takes the start record of rank 0; under torchrun it alone knows the number of restarts."""
        self.start = start
        self.restart = max(self.restart, natural_number(start.get("restart")) or 0)

    def saw(self, time: float | None) -> None:
        """Takes the time of a record."""
        if time is not None:
            self.first_record = time if self.first_record is None else min(self.first_record, time)
            self.last_record = time if self.last_record is None else max(self.last_record, time)
