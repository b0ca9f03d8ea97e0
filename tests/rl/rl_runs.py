"""Small runs of reinforcement learning under faults, and what must hold for their logs and cursors."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import Result, train
from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.config import RunConfig
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.rl.log.interface import LogPosition, LogRecord
from meshwright.rl.log.open_log import open_rollout_reader
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.queue.recount import recount
from meshwright.rl.queue.step_batch import GroupHeader, StepBatch
from meshwright.rl.rollout import RolloutGroup
from tests.kit.small_run import load_cpu_config

STEPS = 8
SETTINGS = (
    "--model.width=16",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.ffn=32",
    "--model.vocab=64",
    "--data.sequence=24",
    "--batch.global=8",
    "--batch.micro=4",
    "--rl.objective=grpo",
    "--rl.task=strings",
    "--rl.group_size=4",
    "--rl.completion_tokens=3",
    "--rl.policy=fixed",
    "--optimizer.lr=0.01",
    "--schedule.kind=constant",
    "--checkpoint.every=2",
    "--checkpoint.seconds=0",
    "--checkpoint.keep=100",
    "--launch.device=cpu",
    "--launch.threads=1",
    "--launch.hang_timeout=60",
    "--launch.restarts=5",
)


def rl_config(*overrides: str, steps: int = STEPS, ranks: int = 1) -> RunConfig:
    return load_cpu_config(overrides=[*SETTINGS, *overrides], steps=steps, ranks=ranks)


def rank_events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunFolder(folder).events(0)) if event["kind"] == kind]


def problems(folder: Path) -> list[str]:
    return [event["message"] for event in rank_events(folder, "rollout_problem")]


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "identity.json").read_text())["run"])


def cursors(folder: Path) -> dict[int, RolloutCursor]:
    """The cursor of every published checkpoint, by step."""
    manifests = [entry.manifest for entry in reversed(list_published(open_run_store(RunFolder(folder))))]
    return {m.step: RolloutCursor.from_json(m.data) for m in manifests if m is not None and "frontier" in m.data}


def records(folder: Path) -> dict[LogPosition, RolloutGroup]:
    """The groups in the log, which has no damage."""
    reader = open_rollout_reader(RunFolder(folder), run_id(folder))
    try:
        found = list(reader.scan())
    finally:
        reader.close()
    assert all(isinstance(record, LogRecord) for record in found)
    return {record.position: RolloutGroup.decode(record.payload) for record in found if isinstance(record, LogRecord)}


def lineage_events(folder: Path) -> list[dict[str, Any]]:
    """The record of every step of the last lineage: a later attempt that repeats a step replaces what follows."""
    steps: dict[int, dict[str, Any]] = {}
    for event in rank_events(folder, "rollouts"):
        steps = {step: value for step, value in steps.items() if step < event["step"]} | {event["step"]: event}
    return [steps[step] for step in sorted(steps)]


def step_batches(folder: Path) -> list[StepBatch]:
    """The batch of every step, from the events of rank 0 and the log: each group by its first record of the version
    that the step names.
    """
    log = records(folder)
    known = cursors(folder)
    batches = []
    for event in lineage_events(folder):
        end = LogPosition.from_json(event["log"])

        def header(number: int, version: list[int], end: LogPosition = end) -> GroupHeader:
            position = min(
                at
                for at, group in log.items()
                if at < end and group.group == number and group.version.to_json() == version
            )
            return GroupHeader.of(log[position], position)

        groups = tuple(header(number, version) for number, version, _ in event["groups"])
        dropped = tuple((header(number, version), cause) for number, version, cause in event["dropped"])
        cursor = known.get(event["step"] + 1) or replace(next(iter(known.values())), position=end)
        batches.append(
            StepBatch(
                event["step"], groups, dropped, cursor if cursor.position == end else replace(cursor, position=end)
            )
        )
    return batches


def assert_rollout_rules(folder: Path, staleness: int, steps: int = STEPS) -> None:
    """At every checkpoint: all rollouts in the log are counted once, by cause; each is trained at most once on the
    lineage, in order, and within the staleness bound.
    """
    batches = step_batches(folder)
    assert [batch.step for batch in batches] == list(range(steps))
    trained = [header.group for batch in batches for header in batch.groups]
    assert len(trained) == len(set(trained)) == steps * 2
    reader = open_rollout_reader(RunFolder(folder), run_id(folder))
    try:
        found = cursors(folder)
        assert steps in found
        for step, cursor in found.items():
            counts = recount(reader, cursor, batches[:step], staleness)
            assert counts == cursor.counts, f"checkpoint of step {step}"
            assert counts.conserved
    finally:
        reader.close()
    # no step that any attempt ever took has broken the bound, whether or not it was lost later
    assert all(event["staleness"] <= staleness for event in rank_events(folder, "rollouts"))


def temporary_files() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("meshwright-*")}


class RLRuns:
    """Runs under faults in one folder, compared with an undisturbed run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[..., str]) -> None:
        self.folder, self.monkeypatch, self.golden = folder, monkeypatch, golden

    def run(self, fault: str = "", *overrides: str, staleness: int = 0, ranks: int = 1, **options: Any) -> Result:
        self.monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
        steps = options.pop("steps", STEPS)
        config = rl_config(f"--rl.staleness={staleness}", *overrides, ranks=ranks, steps=steps)
        return train(config, run=self.folder, quiet=True, **options)

    @property
    def attempts(self) -> int:
        return len(list((self.folder / "attempts").iterdir()))

    def assert_equals_undisturbed_run(self, staleness: int, ranks: int = 1) -> None:
        assert self.final_digest() == self.golden(staleness, ranks)
        assert_rollout_rules(self.folder, staleness)

    def final_digest(self) -> str:
        return final_digest(self.folder)


def final_digest(folder: Path, steps: int = STEPS) -> str:
    """The digest of the last checkpoint: parameters, moments, and what else it has."""
    entry = list_published(open_run_store(RunFolder(folder)))[0]
    assert entry.step == steps
    return state_digest(entry)


def processes_of(folder: Path) -> list[int]:
    """The processes other than this one that have a file of the run folder open, or name it in their command."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            opened = [os.readlink(file) for file in (process / "fd").iterdir()]
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command or any(path.startswith(f"{folder}/") for path in opened):
            found.append(int(process.name))
    return found


def processes_left(folder: Path, seconds: float = 10.0) -> list[int]:
    """The processes of a run that still run after so many seconds: the kernel ends a process with its parent soon."""
    deadline = time.monotonic() + seconds
    while (found := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
