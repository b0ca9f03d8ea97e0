"""Writes the records of a run that never ran: phases, waits and other fields as a test wants them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.config import config_to_toml, load_config
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout

TYPICAL = {"fetch": 0.001, "copy": 0.0, "forward": 0.03, "backward": 0.06, "sync": 0.002, "update": 0.007}
"""Seconds of the phases of a step of 0.1 s that nothing limits."""


class SyntheticRun:
    """The records of a run in a folder. `phases(rank, step)` changes seconds of TYPICAL; the other functions return
    fields of the step record.
    """

    def __init__(self, folder: Path, *settings: str, ranks: int = 2, steps: int = 30) -> None:
        self.folder, self.ranks, self.steps = folder / "run", ranks, steps
        self.config = load_config(overrides=[*settings, "--launch.device=cpu"], ranks=ranks, steps=steps)
        (self.folder / "events").mkdir(parents=True)
        (self.folder / "run.toml").write_text(config_to_toml(self.config))
        self.start: dict[str, Any] = {"ranks": ranks, "steps": steps, "device": "cpu", "hosts": ["one"] * ranks}
        self.phases: Callable[[int, int], dict[str, float]] = lambda _rank, _step: {}
        self.waits: Callable[[int, int], dict[str, float]] = lambda _rank, _step: {}
        self.outside: Callable[[int, int], dict[str, float]] = lambda _rank, _step: {}
        self.gap: Callable[[int, int], float] = lambda _rank, _step: 0.0
        """seconds between two steps that no phase has"""
        self.fields: Callable[[int, int], dict[str, Any]] = lambda _rank, _step: {}
        self.communication: dict[str, Any] = {}
        self.other_events: list[dict[str, Any]] = []

    def history(self) -> RunHistory:
        for rank in range(self.ranks):
            events = [self.record("start", rank, 1000.0, **self.start)]
            now = 1001.0
            for step in range(self.steps):
                outside = self.outside(rank, step)
                now += sum(outside.values()) + self.gap(rank, step)
                phases = dict.fromkeys(STEP_PHASES, 0.0) | TYPICAL | self.phases(rank, step)
                waits, seconds = self.waits(rank, step), sum(phases.values())
                exposed = phases["sync"] + sum(waits.values())
                events.append(
                    self.record(
                        "step",
                        rank,
                        now + seconds,
                        step=step,
                        begin=now,
                        seconds=seconds,
                        loss=2.0,
                        phases=phases,
                        waits=waits,
                        outside=outside,
                        communication={"exposed_seconds": exposed, "exposed_source": "host waits"} | self.communication,
                    )
                    | self.fields(rank, step)
                )
                now += seconds
            if rank == 0:
                events += [self.record(event.pop("kind"), 0, now, **event) for event in self.other_events]
                events.append(self.record("end", 0, now, steps=self.steps, loss=2.0, stopped=""))
            lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
            (self.folder / "events" / f"rank-{rank:05d}.jsonl").write_text(lines)
        return RunHistory(RunFolder(self.folder))

    def write_plan(self, **plan: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps(plan))

    @property
    def layout(self) -> Layout:
        return Layout.from_config(self.config.layout)

    @staticmethod
    def record(kind: str, rank: int, time: float, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "attempt": 1, "rank": rank, "time": time} | fields
