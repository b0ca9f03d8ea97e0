"""Writes the folder of a run that never ran, with all records that a report reads: two attempts, the first killed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from meshwright.base.config import config_to_toml, derive_batch
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.run_prediction import predict_run
from tests.kit.fake_machine import write_machine
from tests.kit.small_run import small_config

PROCESSOR = "made-up processor"
PHASES = {"fetch": 0.001, "copy": 0.0005, "forward": 0.012, "backward": 0.02, "sync": 0.004, "update": 0.0025}
"""Seconds of every step: 40 ms."""
WAITS = {"forward": 0.002, "backward": 0.003}
STEPS, KILLED_AT, RESTORED = 40, 20, 16
BEGAN = 1_700_000_000.0


class ReportedRun:
    """A run of STEPS steps whose first attempt is killed at step KILLED_AT; the second continues from RESTORED."""

    def __init__(self, root: Path, home: Path, *overrides: str, name: str = "run") -> None:
        write_machine(home)
        self.folder = RunFolder(root / name)
        self.config = small_config(*overrides, steps=STEPS)
        self.layout = Layout.from_config(self.config.layout)
        self.plan = predict_run(self.config, 2, "cpu").record
        self.now = BEGAN
        for part in ("events", "attempts/0001", "attempts/0002", "trace", "checkpoints"):
            (self.folder.root / part).mkdir(parents=True)
        self.folder.run_file.write_text(config_to_toml(self.config))
        self.write_plan()
        self.write_records()

    def write_plan(self, **changes: Any) -> None:
        self.plan |= changes
        self.folder.plan_file.write_text(json.dumps(self.plan))

    def append(self, kind: str, rank: int, **fields: Any) -> None:
        name = "supervisor" if rank < 0 else f"rank-{rank:05d}"
        record = {"kind": kind, "rank": rank, "time": self.now} | fields
        with open(self.folder.root / "events" / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def write_records(self) -> None:
        for attempt, (first, last) in enumerate([(0, KILLED_AT), (RESTORED, STEPS)], 1):
            self.now = BEGAN + 100.0 * (attempt - 1)
            self.append("attempt_start", -1, attempt=attempt, restart=attempt - 1)
            for rank in range(self.layout.ranks):
                self.now = BEGAN + 100.0 * (attempt - 1) + 1
                self.append("start", rank, attempt=attempt, **self.start())
                if attempt == 2:
                    self.append("restored", rank, attempt=2, step=RESTORED, checkpoint="", seconds=0.1, changes=[])
                for step in range(first, last):
                    self.write_step(rank, attempt, step)
            self.append("attempt_end", -1, attempt=attempt)
        self.append("end", 0, attempt=2, steps=STEPS, loss=2.0, skipped=0, parameters_digest="0", stopped="")
        self.append("eval", 0, attempt=2, step=STEPS - 1, loss=2.125, tokens=80)
        self.write_incident(1, outcome="failed", rank=1, step=KILLED_AT, phase="backward")
        self.write_incident(2, outcome="complete")

    def start(self) -> dict[str, Any]:
        batch = derive_batch(self.config.batch, self.layout.data_degree)
        return {
            "steps": STEPS,
            "parameters": 76_096,
            "unit": "tokens",
            "layout": str(self.layout),
            "shard": self.config.layout.shard,
            "hosts": [self.plan["host"]] * self.layout.ranks,
            "ranks": self.layout.ranks,
            "batch": str(batch),
            "device": "cpu",
            "processor": PROCESSOR,
            "precision": "fp32",
            "optimizer": "adamw",
            "torch": "2.13.0",
            "meshwright": "0.2.0",
        }

    def write_step(self, rank: int, attempt: int, step: int) -> None:
        seconds, counted = sum(PHASES.values()), step == 1 or (step == RESTORED + 1 and attempt == 2)
        begin, self.now = self.now, self.now + seconds
        if counted:
            rows = self.plan["communication_exact"]["0"]
            memory = {"peak": {"parameter": 8 << 20}, "at_peak": {"parameter": 8 << 20, "optimizer": 4 << 20}}
            memory["peak_total"] = 16 << 20
            self.append("counters", rank, attempt=attempt, step=step, communication=rows, memory=memory)
        self.append(
            "step",
            rank,
            attempt=attempt,
            step=step,
            begin=begin,
            seconds=seconds * (9 if counted else 1),
            loss=4.0 - step / 20,
            grad_norm=1.0 + step / 100,
            tokens=2000,
            samples=16,
            phases=PHASES,
            waits=WAITS,
            counted=counted,
            communication={"exposed_seconds": PHASES["sync"] + sum(WAITS.values()), "exposed_source": "host waits"},
        )
        self.write_spans(rank, attempt, step, begin)

    def write_spans(self, rank: int, attempt: int, step: int, begin: float) -> None:
        starts, at = [], 0.0
        for phase, spent in PHASES.items():
            starts.append([phase, round(at * 1e6)])
            at += spent
        place = {"kind": "rank", "attempt": attempt, "rank": rank, "ranks": self.layout.ranks, "device": "cpu"}
        record = {"kind": "step", "attempt": attempt, "step": step, "begin": begin, "phases": starts}
        record |= {"end": round(at * 1e6), "waits": [[2000, 4000]]}
        with open(self.folder.root / "trace" / f"rank-{rank:05d}.spans.jsonl", "a") as file:
            file.write(json.dumps(place) + "\n" + json.dumps(record) + "\n")

    def write_profile(self, first: int, last: int, attempt: int) -> None:
        """Writes a profile of rank 0 without events: all exposed time belongs to the control messages."""
        own = {
            "attempt": attempt,
            "rank": 0,
            "ranks": self.layout.ranks,
            "device": "cpu",
            "axes": {},
            "collectives": [],
        }
        text = json.dumps({"meshwright": own, "baseTimeNanoseconds": 0, "traceEvents": []})
        name = f"rank-00000.steps-{first}-{last}.a{attempt:04d}.json.gz"
        (self.folder.root / "trace" / name).write_bytes(gzip.compress(text.encode()))

    def write_incident(self, attempt: int, **fields: Any) -> None:
        incident = {
            "attempt": attempt,
            "message": "rank 1 was killed by signal 9",
            "verdict": "infrastructure",
        } | fields
        self.folder.incident(attempt).write_text(json.dumps(incident))
