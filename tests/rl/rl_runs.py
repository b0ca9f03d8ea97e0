"""Small runs of reinforcement learning under faults, and what must hold for their logs and cursors."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from small_run import load_cpu_config

from meshwright.checkpoint.listing import list_published, open_run_store
from meshwright.config import RunConfig
from meshwright.rl.log.interface import LogPosition, LogRecord
from meshwright.rl.log.open_log import open_rollout_reader
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.queue.recount import recount
from meshwright.rl.queue.step_batch import GroupHeader, StepBatch
from meshwright.rl.rollout import RolloutGroup
from meshwright.telemetry.events import read_events
from meshwright.telemetry.run_folder import RunFolder

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
    entries = list_published(open_run_store(RunFolder(folder)))
    return {e.step: RolloutCursor.from_json(e.manifest.data) for e in reversed(entries) if e.manifest is not None}


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
