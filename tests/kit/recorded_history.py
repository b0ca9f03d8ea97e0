"""Writes the records of a run that never ran: attempts, steps of every rank, checkpoints and incidents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meshwright.base.checkpoint.manifest import canonical_digest
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.heartbeat import Heartbeat, process_start
from meshwright.base.records.incidents import Incident
from meshwright.base.records.run_folder import RunFolder

BEGIN = 1_700_000_000.0
PHASES = {"fetch": 0.01, "copy": 0.0, "forward": 0.03, "backward": 0.04, "sync": 0.015, "update": 0.005}
"""A step of 0.1 s."""


class RecordedRun:
    """A run folder whose clock the test advances."""

    def __init__(self, root: Path, ranks: int = 2, steps: int = 100) -> None:
        self.root, self.ranks, self.steps = root, ranks, steps
        self.now = BEGIN
        self.attempt = 0
        (root / "events").mkdir(parents=True)
        (root / "run.toml").write_text(f"steps = {steps}\n")

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root)

    def history(self) -> RunHistory:
        return RunHistory(self.folder)

    def write(self, kind: str, by: int = 0, time: float | None = None, **fields: Any) -> None:
        """Appends a record of a rank; -1 is the supervisor."""
        name = f"rank-{by:05d}.jsonl" if by >= 0 else "supervisor.jsonl"
        stamp = self.now if time is None else time
        record = {"kind": kind, "attempt": self.attempt, "rank": by, "time": stamp} | fields
        with (self.root / "events" / name).open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def start(self, restart: int = 0, first_step: int = 0, seconds: float = 2.0, **fields: Any) -> None:
        """Starts an attempt; its first step begins `seconds` later."""
        self.attempt += 1
        self.folder.attempt(self.attempt).mkdir(parents=True)
        self.write("attempt_start", -1, restart=restart, **({} if restart else {"command_started": self.now}))
        self.now += seconds
        for rank in range(self.ranks):
            self.write("start", rank, steps=self.steps, ranks=self.ranks, restart=restart, **fields)
        if first_step:
            self.write("restored", step=first_step, checkpoint="step", seconds=0.5, changes=[])

    def step(self, step: int, own: dict[int, dict[str, float]] | None = None, **fields: Any) -> None:
        """Runs a step on all ranks; `own` has the phases of single ranks. The other ranks wait for the slowest."""
        phases = {rank: PHASES | (own or {}).get(rank, {}) for rank in range(self.ranks)}
        local = {rank: sum(of.values()) - of["sync"] for rank, of in phases.items()}
        begin = self.now
        for rank, of in phases.items():
            of["sync"] += max(local.values()) - local[rank]
            self.now = begin + sum(of.values())
            self.write(
                "step",
                rank,
                step=step,
                begin=begin,
                seconds=sum(of.values()),
                phases=of,
                waits={},
                loss=5.0 - step / 100,
                grad_norm=1.0,
                lr=1e-3,
                tokens=160,
                samples=16,
                memory=1 << 20,
                communication={"exposed_seconds": of["sync"], "exposed_source": "host waits", "buckets": 1},
                **fields,
            )

    def save(self, step: int, stall: float = 0.2) -> None:
        """Publishes a checkpoint."""
        folder = self.root / "checkpoints" / f"step-{step:08d}.a{self.attempt:04d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        self.write("checkpoint", step=step, bytes=1000, stall_seconds=stall, seconds=0.5, retention_error="")

    def end(self, outcome: str = "complete", seconds: float = 1.0, **incident: Any) -> None:
        """Ends the attempt `seconds` later."""
        self.now += seconds
        if outcome == "complete":
            self.write("end", steps=self.steps, loss=4.0, stopped="", parameters_digest="", outside={})
        self.write("attempt_end", -1)
        Incident(self.attempt, outcome, **incident).write(self.folder)

    def hold(self, pid: int | None = None, **changes: Any) -> None:
        """Writes the lease of the attempt, of this process or of another one."""
        from meshwright.core.recover.lease import process_identity

        pid = os.getpid() if pid is None else pid
        values = {**process_identity(), "pid": pid, "started": process_start(pid), "attempt": self.attempt}
        values |= {"inherited": {}, **changes}
        path = self.folder.attempt(self.attempt) / "lease.json"
        path.write_text(json.dumps(values | {"digest": canonical_digest(values)}))

    def beat(self, rank: int, phase: str, step: int, waiting: bool = False) -> Heartbeat:
        """Writes the heartbeat of a rank, which this process seems to be."""
        heartbeat = Heartbeat(self.folder.heartbeat(self.attempt, rank))
        heartbeat.enter(phase, step)
        heartbeat.set_waiting(waiting)
        return heartbeat
