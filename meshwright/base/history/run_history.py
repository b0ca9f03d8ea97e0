"""The history of a run, read from its folder as untrusted files, and again as it grows. Torch-free."""

from __future__ import annotations

import os
import time
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.base.history.attempts import FAILURES, MAX_ATTEMPTS, AttemptHistory
from meshwright.base.history.checkpoints import CheckpointHistory, CheckpointRecords
from meshwright.base.history.clean_events import FIELDS, EventList, InvalidField, clean_event, integer
from meshwright.base.history.event_tail import EventTail, FileReplaced
from meshwright.base.history.liveness import MAX_NAMES, Liveness, event_ranks
from meshwright.base.history.rank_steps import RankSteps, StepTotals, ignore
from meshwright.base.history.rollout_table import RolloutHistory
from meshwright.base.history.step_table import StepRows, StepTable
from meshwright.base.io import MAX_JSON_BYTES, read_json, read_regular_file
from meshwright.base.records.events import Event
from meshwright.base.records.heartbeat import HeartbeatReading
from meshwright.base.records.run_folder import RunFolder, parse_attempt
from meshwright.base.records.untrusted_records import (
    RecordedCounters,
    bounded_object,
    parse_counters,
    parse_event,
    unix_time,
)
from meshwright.errors import ConfigError, MeshwrightError

LISTS = {
    "eval": "evaluations",
    "save_failed": "save_failures",
    "straggler": "stragglers",
    "hang": "hangs",
    "bad_sample": "bad_samples",
    "nonfinite": "nonfinite",
    "callback_failed": "callback_failures",
    "events_lost": "lost_events",
}
"""kind -> the list of a RunHistory that keeps its events"""
RESTART_SECONDS = 30.0
"""A supervisor starts the next attempt sooner after a failure, or not at all."""
EVERY_RANK = ("bad_sample", "nonfinite", "callback_failed", "events_lost")
"""The kinds of which the records of all ranks are kept; those of the others are equal to the records of rank 0."""


class RunHistory:
    """What happened in a run so far. `update` reads what was appended since it was last called.

    Nothing in the folder makes it fail: what cannot be read is missing. A folder without the files of a run raises a
    ConfigError when the history is made.
    """

    def __init__(self, folder: RunFolder) -> None:
        if not any((folder.root / name).exists() for name in ("run.toml", "events", "attempts")):
            raise ConfigError(f"{folder.root} is not a run folder", "expected a folder that meshwright train wrote")
        folder.require_own_folders()
        self.folder = folder
        self._forget()
        self.update()

    def _forget(self) -> None:
        self.evaluations, self.save_failures, self.stragglers = EventList(), EventList(), EventList()
        self.hangs, self.bad_samples, self.nonfinite = EventList(), EventList(), EventList()
        self.callback_failures, self.lost_events = EventList(), EventList()
        self.rollouts = RolloutHistory()
        """the rollouts of a run of reinforcement learning"""
        self.attempts: list[AttemptHistory] = []
        """the attempts, oldest first"""
        self.checkpoints: list[CheckpointHistory] = []
        """the checkpoints in the order of their steps"""
        self.counters: dict[int, RecordedCounters] = {}
        """the newest counters of every rank"""
        self.pipelines: dict[int, dict[str, Any]] = {}
        """what the schedule predicts for every rank of a pipeline, from its newest start record"""
        self.expert_loads: Event | None = None
        """the newest `experts` record"""
        self.config: dict[str, Any] = {}
        """the content of run.toml"""
        self.plan: dict[str, Any] = {}
        """the content of plan.json, whose values are validated where they are used"""
        self.newest_record: float | None = None
        """the time of the newest record, in Unix seconds of the rank that wrote it"""
        self._attempts: dict[int, AttemptHistory] = {}
        self._ranks: dict[int, RankSteps] = {}
        self._rank_attempts: dict[int, int] = {}
        self._checkpoints = CheckpointRecords()
        self._supervisor = EventTail(self.folder.root / "events" / "supervisor.jsonl")
        self._liveness = Liveness()
        self._file_times: dict[str, int] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks of the newest attempt that have records."""
        newest = self._rank_attempts.get(0, 0)
        return sorted(rank for rank, attempt in self._rank_attempts.items() if attempt == newest)

    @property
    def heartbeats(self) -> dict[int, HeartbeatReading]:
        """The heartbeats of the newest attempt."""
        return self._liveness.heartbeats

    @property
    def is_alive(self) -> bool:
        """Whether a process of the newest attempt runs on this host, or writes on another."""
        return self._liveness.is_alive

    @property
    def liveness(self) -> Liveness:
        return self._liveness

    @property
    def newest_attempt(self) -> AttemptHistory | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def measured_attempt(self) -> AttemptHistory | None:
        """The newest attempt, without those that found the run complete and ran no step."""
        trained = (one for one in reversed(self.attempts) if one.steps_recorded or one.outcome != "complete")
        return next(trained, self.newest_attempt)

    @property
    def total_steps(self) -> int:
        """The number of steps of the run, or 0 if it is not known yet."""
        for attempt in reversed(self.attempts):
            if type(steps := attempt.start.get("steps")) is int and 0 <= steps < 1 << 53:
                return steps
        steps = self.config.get("steps")
        return steps if type(steps) is int and steps >= 0 else 0

    def is_restarting(self, now: float) -> bool:
        """Whether the newest attempt has failed, and its supervisor is about to start the next one."""
        newest = self.newest_attempt
        if newest is None or newest.outcome not in FAILURES or not self.is_alive or newest.ended is None:
            return False
        return now - newest.ended < RESTART_SECONDS  # the process of a notebook lives on after its job has failed

    def steps(self, rank: int = 0) -> StepTable:
        """The recorded steps of a rank, through all attempts; of ranks other than 0 the newest ones and samples."""
        return self._ranks[rank].table if rank in self._ranks else StepRows().table()

    @property
    def totals(self) -> StepTotals:
        """The sums over all steps of rank 0, those that are no longer kept included."""
        return self._ranks[0].totals if 0 in self._ranks else StepTotals()

    def update(self, now: float | None = None) -> None:
        """Reads what was appended since the last call. If the folder has another run by now, that is read instead."""
        now = time.time() if now is None else now
        try:
            self._read(now)
        except FileReplaced:
            self._forget()
            try:
                self._read(now)
            except FileReplaced:  # again, at this moment: the next call reads it
                self._forget()

    def _read(self, now: float) -> None:
        self._read_files()
        for number in attempt_folders(self.folder):
            self._attempt(number)
        for line in self._supervisor.new_lines():
            if (event := parse_event(line)) is not None:
                self._receive(event, -1)
        present = event_ranks(self.folder)
        for rank in present:
            if rank not in self._ranks:
                self._ranks[rank] = RankSteps(self.folder.events(rank), rank, len(present))
            self._read_rank(self._ranks[rank])
        self.checkpoints = self._checkpoints.update(self.folder)
        self.attempts = [self._attempts[number] for number in sorted(self._attempts)[-MAX_ATTEMPTS:]]
        newest = self.newest_attempt
        if newest is None:
            return
        self._liveness.update(self.folder, newest.number, self.newest_record, now)
        for attempt in self.attempts:
            attempt.is_newest = attempt is newest
            attempt.is_alive = attempt.is_newest and self.is_alive
            attempt.read_incident(self.folder)

    def _read_rank(self, records: RankSteps) -> None:
        receive_step = self.rollouts.receive_step if records.rank == 0 else ignore
        new = records.update(lambda event: self._receive(event, records.rank), receive_step)
        if len(new):
            self._rank_attempts[records.rank] = int(new.attempt[-1])
        if records.rank == 0:
            numbers = new.attempt
            for number in sorted(set(numbers.tolist())):
                rows = new.select(numbers == number)
                attempt = self._attempt(number)
                first = attempt.steps_recorded[0] if attempt.steps_recorded else int(rows.step[0])
                attempt.steps_recorded = (first, int(rows.step[-1]))
                for stamp in (rows.begin[0], rows.time[0], rows.time[-1]):
                    attempt.saw(unix_time(float(stamp)))
                self._saw(attempt.last_record)

    def _receive(self, event: Event, rank: int) -> None:
        """Takes a record other than a step."""
        kind = event.get("kind")
        if rank == 0:
            self.rollouts.receive(event)
        if kind == "start":
            self._receive_start(event, rank)
        elif kind == "counters":
            if (counters := parse_counters(event)) is not None:
                self.counters[rank] = counters
        elif isinstance(kind, str) and kind in FIELDS and (rank <= 0 or kind in EVERY_RANK):
            cleaned = clean_event(event)
            if cleaned is None:
                return
            attempt = self._attempt(cleaned["attempt"])
            attempt.saw(cleaned["time"])
            self._saw(cleaned["time"])
            attempt.receive(cleaned)
            if kind in LISTS:
                getattr(self, LISTS[kind]).keep(cleaned)
            elif kind in ("checkpoint", "damaged"):
                self._checkpoints.receive(cleaned)
            elif kind == "experts":
                self.expert_loads = cleaned

    def _receive_start(self, event: Event, rank: int) -> None:
        try:
            number = integer(event.get("attempt"))
        except InvalidField:
            return
        self._rank_attempts[rank] = number
        self.pipelines[rank] = bounded_object(event.get("pipeline"))
        if rank == 0:
            attempt = self._attempt(number)
            attempt.receive_start(bounded_object(event))
            attempt.saw(unix_time(event.get("time")))
            self._saw(attempt.last_record)

    def _attempt(self, number: int) -> AttemptHistory:
        if len(self._attempts) > 2 * MAX_ATTEMPTS:
            self._attempts = {kept: self._attempts[kept] for kept in sorted(self._attempts)[-MAX_ATTEMPTS:]}
        return self._attempts.setdefault(number, AttemptHistory(number))

    def _saw(self, time: float | None) -> None:
        if time is not None:
            self.newest_record = time if self.newest_record is None else max(self.newest_record, time)

    def _read_files(self) -> None:
        """Reads run.toml and plan.json if they have changed."""
        readers = {"run.toml": read_toml, "plan.json": read_json}
        for path in (self.folder.run_file, self.folder.plan_file):
            try:
                modified = path.lstat().st_mtime_ns
                if self._file_times.get(path.name) == modified:
                    continue
                content = bounded_object(readers[path.name](path))
            except (OSError, MeshwrightError):
                continue
            self._file_times[path.name] = modified
            if path.name == "run.toml":
                self.config = content
            else:
                self.plan = content


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file of a run folder; empty if it is not TOML."""
    content = read_regular_file(path, MAX_JSON_BYTES, str(path), "a run file", follow=False)
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError):
        return {}


def attempt_folders(folder: RunFolder) -> list[int]:
    """The numbers of the attempts that have a folder; the newest MAX_ATTEMPTS."""
    try:
        with os.scandir(folder.root / "attempts") as entries:
            names = [entry.name for entry in islice(entries, MAX_NAMES)]
    except OSError:
        return []
    return sorted(number for name in names if (number := parse_attempt(name)))[-MAX_ATTEMPTS:]
