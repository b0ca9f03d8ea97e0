"""The interface of a callback, and what it may ask of the run. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.events import Event, read_events
from meshwright.base.records.run_folder import RunFolder

HOOKS = {
    "start": "on_start",
    "step": "on_step",
    "eval": "on_evaluate",
    "checkpoint": "on_checkpoint",
    "incident": "on_incident",
    "end": "on_end",
}
"""The kind of a record -> the method that receives it."""


class StopRequested(Exception):
    """A callback has asked the run to end; every rank ends before the same step."""


@dataclass
class RunContext:
    """The run that calls a callback: what it is, and what a callback may ask of it."""

    folder: RunFolder
    run_id: str
    """the id of the run, the same in all attempts"""
    attempt: int
    rank: int
    config: Mapping[str, Any]
    """the settings of the run, as in its run.toml"""
    first_step: int = 0
    """the first step of this attempt"""
    stop_reason: str = ""
    """why a callback has asked the run to stop; empty: none has"""
    save_requested: bool = False
    kept_checkpoints: frozenset[int] = frozenset()
    """numbers of completed steps of the checkpoints that are never deleted"""
    on_keep: Callable[[frozenset[int]], None] = field(default=lambda _kept: None, repr=False)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.root

    def stop(self, reason: str) -> None:
        """Asks the run to end after the current step, on every rank, with a checkpoint and exit code 0."""
        self.stop_reason = self.stop_reason or reason or "a callback asked for it"

    def save_checkpoint(self) -> None:
        """Asks for a checkpoint of the evaluated weights; has an effect in `on_evaluate`."""
        self.save_requested = True

    def keep_checkpoints(self, steps: frozenset[int]) -> None:
        """Excludes the checkpoints after these numbers of completed steps, and no others, from deletion."""
        self.kept_checkpoints = steps
        self.on_keep(steps)

    def checkpoints(self) -> list[int]:
        """The numbers of completed steps of the published checkpoints, newest first."""
        return [entry.step for entry in list_published(open_run_store(self.folder))]

    def records(self, kind: str) -> Iterator[Event]:
        """The records of a kind that earlier attempts wrote on this rank, for the steps before `first_step`. If several
        attempts recorded a step, the last one counts.
        """
        by_step = {
            record["step"]: record
            for record in read_events(self.folder.events(self.rank))
            if record.get("kind") == kind and record.get("attempt") != self.attempt and type(record.get("step")) is int
        }
        yield from (by_step[step] for step in sorted(by_step) if step < self.first_step)


class Callback:
    """Receives the records of a run: the same ones that its event files have, as dicts. Override what you need.

    A callback runs on rank 0, between steps; with `every_rank = True` on every rank, with the records of that rank. It
    gets copies, random generators are restored after each call, and an exception is reported once, with the name of the
    callback, and does not end the run. A callback that does not return is reported as a hang.
    """

    every_rank: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self).__name__

    def on_start(self, record: Event, run: RunContext) -> None:
        """An attempt starts: the checkpoint is restored, and no step has run."""

    def on_step(self, record: Event, run: RunContext) -> None:
        """A step is complete. On CUDA, its record is read one step late."""

    def on_evaluate(self, record: Event, run: RunContext) -> None:
        """An evaluation is complete."""

    def on_checkpoint(self, record: Event, run: RunContext) -> None:
        """A checkpoint is published."""

    def on_incident(self, record: Event, run: RunContext) -> None:
        """An attempt failed or hung. Runs on rank 0 of the next attempt, before `on_start`; if the job gives up, it
        runs in the process of the supervisor.
        """

    def on_end(self, record: Event, run: RunContext) -> None:
        """The run is complete. It is not called if an attempt fails."""
