"""Runs of the trainer that are small enough for an experiment, and the records that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, load_config
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.events import Event, read_events
from meshwright.base.records.failures import RanksFailed
from meshwright.base.records.incidents import Incident, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import NO_USER_CODE, UserCode
from meshwright.core.launch.job import make_job
from meshwright.errors import MeshwrightError
from meshwright.prover.claims import fault_environment, proof_folder, supervise_quietly

SETTINGS = (
    "model.vocab=64",
    "model.width=16",
    "model.layers=4",
    "model.heads=2",
    "model.kv_heads=2",
    "model.ffn=32",
    "data.kind=synthetic",
    "data.samples=512",
    "data.sequence=8",
    "schedule.warmup=1",
    "eval.every=0",
    "checkpoint.mode=off",
    "precision.compute=fp64",
    "launch.device=cpu",
    "launch.restarts=0",
    "launch.hang_timeout=60",
)
"""Settings with which a step takes milliseconds. float64 leaves rounding no room to hide an error."""

scratch_folder = proof_folder
"""A temporary folder that exists until the context ends."""


@dataclass(frozen=True)
class SmallRun:
    """A run that has ended, and its records."""

    root: Path
    config: RunConfig
    digest: str
    """digest of the parameters; empty if the run failed"""
    error: MeshwrightError | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root)

    @property
    def history(self) -> RunHistory:
        return RunHistory(self.folder)

    def events(self, kind: str, rank: int = 0) -> list[Event]:
        return [event for event in read_events(self.folder.events(rank)) if event["kind"] == kind]

    def steps(self, rank: int = 0) -> dict[int, Event]:
        """The record of every step; if several attempts completed a step, the last one counts."""
        return {event["step"]: event for event in self.events("step", rank)}

    def losses(self) -> list[float]:
        return [event["loss"] for _, event in sorted(self.steps().items())]

    def counters(self, rank: int = 0) -> Event:
        """What the counters saw of the first counted step."""
        return self.events("counters", rank)[0]

    def collectives(self, rank: int = 0) -> dict[tuple[str, str], Mapping[str, Any]]:
        """(axis, collective) -> calls, message_bytes and wire_bytes of the counted step."""
        return {(row["axis"], row["collective"]): row for row in self.counters(rank)["communication"]}

    def peak_memory(self, rank: int = 0) -> Mapping[str, int]:
        """The peak bytes of every memory class in the counted step."""
        peak: Mapping[str, int] = self.counters(rank)["memory"]["peak"]
        return peak

    def incidents(self) -> list[Incident]:
        return read_incidents(self.folder)


def train_small(
    root: Path,
    *settings: str,
    steps: int = 3,
    faults: str = "",
    user: UserCode = NO_USER_CODE,
    may_fail: bool = False,
) -> SmallRun:
    """Trains in `root` as `meshwright train` does, from the newest checkpoint if there is one. With `may_fail`, the
    error of a run that fails is part of the result.
    """
    config = load_config(overrides=[*SETTINGS, *settings], steps=steps)
    try:
        with fault_environment(faults):
            summary = supervise_quietly(make_job(config, RunFolder(root), user))
    except MeshwrightError as error:
        if not may_fail or error.exit_code > 128:
            raise
        return SmallRun(root, config, "", error.cause() if isinstance(error, RanksFailed) else error)
    values = summary if isinstance(summary, dict) else vars(summary)
    return SmallRun(root, config, values["parameters_digest"])
