"""A small run that is never disturbed, and the oracles that hold every disturbed one against it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import small_config

from meshwright import train
from meshwright.api import TrainResult
from meshwright.checkpoint.listing import list_published, open_run_store
from meshwright.checkpoint.unsharded import state_digest
from meshwright.checkpoint.verify import find_damage
from meshwright.recover.incidents import Incident, read_incidents
from meshwright.telemetry import events
from meshwright.telemetry.events import read_events
from meshwright.telemetry.run_folder import RunFolder

STEPS = 12
PATIENT = (
    "--checkpoint.every=3",
    "--checkpoint.seconds=0",
    "--checkpoint.mode=sync",
    "--launch.hang_timeout=20",
    "--eval.every=5",
)


def config(*overrides: str, ranks: int = 2) -> Any:
    return small_config(*PATIENT, *overrides, steps=STEPS, ranks=ranks)


def ledger(folder: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """The record of every step: where several attempts made it, the last counts."""
    return events.completed_steps(RunFolder(folder).events(rank))


def losses(folder: Path) -> list[str]:
    """Bit for bit."""
    return [float(record["loss"]).hex() for _, record in sorted(ledger(folder).items())]


def final_digest(folder: Path) -> str:
    entry = list_published(open_run_store(RunFolder(folder)))[0]
    assert entry.step == STEPS
    return state_digest(entry)


class Runs:
    """Runs under faults, judged against the undisturbed one of as many ranks."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[int], Path]) -> None:
        self.folder, self.monkeypatch, self.golden = base / "run", monkeypatch, golden

    def run(self, fault: str = "", *overrides: str, ranks: int = 2, **words: Any) -> TrainResult:
        self.monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
        return train(config(*overrides, ranks=ranks), run=self.folder, quiet=True, **words)

    @property
    def incidents(self) -> list[Incident]:
        return read_incidents(RunFolder(self.folder))

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [e for e in read_events(RunFolder(self.folder).events(rank)) if e["kind"] == kind]

    def supervisor_events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.folder / "events" / "supervisor.jsonl") if e["kind"] == kind]

    def published(self) -> list[Any]:
        return list_published(open_run_store(RunFolder(self.folder)))

    def assert_as_if_undisturbed(self, ranks: int = 2) -> None:
        """O1 bitwise, O2 ledger, O3 one truth, O5 nothing left behind."""
        golden = self.golden(ranks)
        assert final_digest(self.folder) == final_digest(golden)
        assert losses(self.folder) == losses(golden)
        assert sorted(ledger(self.folder)) == list(range(STEPS))
        assert all(record["samples"] == 16 for record in ledger(self.folder).values())
        for entry in self.published():
            assert find_damage(entry) == []
        assert not children(), "a process was left behind"


def children() -> list[int]:
    """This process's children that still run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]


class Poisoned:
    """A source in which some samples raise, or never come."""

    def __init__(self, bad: dict[int, str]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 400

    def fingerprint(self) -> str:
        return "poisoned"

    def __getitem__(self, index: int) -> np.ndarray:
        match self.bad.get(index):
            case "raises":
                raise ValueError("no such encoding")
            case "hangs":
                time.sleep(1e6)
            case "crashes":
                os.abort()
        return (np.arange(17) * (index + 3)) % 250
