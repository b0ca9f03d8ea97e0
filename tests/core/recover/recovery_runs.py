"""Small runs under injected faults, and the comparison with an undisturbed run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright import Result, train
from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.events import read_events
from meshwright.base.records.incidents import Incident, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.checkpoint.verify import find_damage
from tests.kit.small_run import small_config, step_records

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


def losses(folder: Path) -> list[str]:
    """The loss of every step, as exact hexadecimal numbers."""
    return [float(record["loss"]).hex() for _, record in sorted(step_records(folder).items())]


def final_digest(folder: Path) -> str:
    entry = list_published(open_run_store(RunFolder(folder)))[0]
    assert entry.step == STEPS
    return state_digest(entry)


class Runs:
    """Runs with injected faults, compared with an undisturbed run on the same number of ranks."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[int], Path]) -> None:
        self.folder, self.monkeypatch, self.golden = base / "run", monkeypatch, golden
        self.processes = set(children())
        """processes that other tests keep, such as a warm runner"""

    def run(self, fault: str = "", *overrides: str, ranks: int = 2, **options: Any) -> Result:
        self.monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
        return train(config(*overrides, ranks=ranks), run=self.folder, quiet=True, **options)

    @property
    def incidents(self) -> list[Incident]:
        return read_incidents(RunFolder(self.folder))

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [e for e in read_events(RunFolder(self.folder).events(rank)) if e["kind"] == kind]

    def supervisor_events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.folder / "events" / "supervisor.jsonl") if e["kind"] == kind]

    def published(self) -> list[Any]:
        return list_published(open_run_store(RunFolder(self.folder)))

    def assert_equals_undisturbed_run(self, ranks: int = 2) -> None:
        """The final state and the losses are bitwise equal, every step is recorded once, every checkpoint verifies, and
        no process is left.
        """
        golden = self.golden(ranks)
        assert final_digest(self.folder) == final_digest(golden)
        assert losses(self.folder) == losses(golden)
        assert sorted(step_records(self.folder)) == list(range(STEPS))
        assert all(record["samples"] == 16 for record in step_records(self.folder).values())
        for entry in self.published():
            assert find_damage(entry) == []
        assert set(children()) <= self.processes, "a process was left behind"


def children() -> list[int]:
    """The child processes that still run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]


class FaultySource:
    """A source in which some samples raise, hang or crash."""

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
