"""Writes the records of a run that never ran, so that a diagnosis can be tested on any history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder

STEP_SECONDS = 0.1


def noisy(steps: int, level: float = 5.0, noise: float = 0.02, seed: int = 0) -> list[float]:
    """Losses at one level."""
    return (level + noise * np.random.default_rng(seed).standard_normal(steps)).tolist()


class RecordedRun:
    """A run folder with events and incidents. Time starts at 1000 and advances by STEP_SECONDS per step."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root / "run")
        (self.folder.root / "events").mkdir(parents=True)
        self.folder.run_file.write_text("")
        self.attempt, self.time = 0, 1000.0

    def write(self, kind: str, rank: int = 0, **fields: Any) -> None:
        record = {"kind": kind, "attempt": self.attempt, "rank": rank, "time": self.time, **fields}
        name = self.folder.events(rank) if rank >= 0 else self.folder.root / "events" / "supervisor.jsonl"
        with open(name, "a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def begin(self, step: int = 0, ranks: int = 2) -> None:
        """Begins the next attempt, at a step."""
        self.attempt += 1
        self.folder.attempt(self.attempt).mkdir(parents=True)
        self.write("attempt_start", -1, restart=self.attempt - 1)
        self.write("start", ranks=ranks, steps=100)
        if step:
            self.write("restored", step=step, checkpoint="", seconds=0.1, changes=[])

    def steps(self, first: int, losses: Sequence[float | None], **columns: Any) -> None:
        """Records one step per loss; a column is a value for all steps, or a list with one value per step."""
        for index, loss in enumerate(losses):
            values = {name: value[index] if isinstance(value, list) else value for name, value in columns.items()}
            begin, self.time = self.time, self.time + STEP_SECONDS
            fields = {"loss": loss, "grad_norm": 1.0, "lr": 0.003, "tokens": 64, "samples": 8} | values
            phases = {"forward": STEP_SECONDS}
            self.write("step", step=first + index, begin=begin, seconds=STEP_SECONDS, phases=phases, **fields)

    def end(self, outcome: str = "complete", **incident: Any) -> None:
        """Ends the attempt with an incident."""
        self.write("attempt_end", -1)
        record = {"attempt": self.attempt, "outcome": outcome, **incident}
        self.folder.incident(self.attempt).write_text(json.dumps(record))

    def history(self) -> RunHistory:
        return RunHistory(self.folder)
