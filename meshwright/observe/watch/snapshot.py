"""What every view of a run shows at one moment: signals, account, ranks, checkpoints, incidents. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.history.account import GoodputAccount
from meshwright.history.goodput import goodput
from meshwright.history.run_history import RunHistory
from meshwright.history.signals import Signals, read_signals
from meshwright.telemetry.phases import STEP_PHASES

RECENT_STEPS = 20
"""The newest steps of a rank over which its phases are averaged."""
MAX_LISTED = 64
"""Ranks, checkpoints and incidents in the JSON of a snapshot."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank: where it is, and its newest steps."""

    rank: int
    step: int
    phase: str
    waiting: bool
    phases: dict[str, float]
    """mean seconds per step"""
    own_seconds: float
    """mean seconds per step that the rank spends by itself, not waiting for others"""


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment."""

    history: RunHistory
    now: float
    account: GoodputAccount
    signals: Signals
    ranks: list[RankSnapshot]
    """slowest first"""

    def to_json(self) -> dict[str, Any]:
        history = self.history
        attempts = [
            {
                "attempt": attempt.number,
                "started": attempt.started,
                "ended": attempt.ended,
                "restart": attempt.restart,
                "first_step": attempt.first_step,
                "done": attempt.done,
                "outcome": attempt.outcome,
                "message": attempt.incident.message if attempt.incident is not None else "",
            }
            for attempt in history.attempts[-MAX_LISTED:]
        ]
        return {
            "run": str(history.folder.root),
            "time": self.now,
            "signals": self.signals.to_json(),
            "goodput": self.account.to_json(),
            "attempts": attempts,
            "ranks": [asdict(rank) for rank in self.ranks[:MAX_LISTED]],
            "checkpoints": [asdict(found) for found in history.checkpoints[-MAX_LISTED:]],
        }


def take_snapshot(history: RunHistory, now: float) -> RunSnapshot:
    """The snapshot of a history as it was last updated."""
    account = goodput(history, now)
    return RunSnapshot(history, now, account, read_signals(history, now, account), rank_snapshots(history))


def rank_snapshots(history: RunHistory) -> list[RankSnapshot]:
    """Every rank of the newest attempt that has records or a heartbeat, slowest first."""
    found = []
    for rank in sorted({*history.ranks, *history.heartbeats}):
        recent = history.steps(rank).select(slice(-RECENT_STEPS, None))
        reading = history.heartbeats.get(rank)
        means = {phase: mean(values) for phase, values in recent.phases.items()}
        found.append(
            RankSnapshot(
                rank,
                reading.step if reading is not None else int(recent.step[-1]) if len(recent) else -1,
                reading.phase if reading is not None else "",
                reading is not None and reading.waiting,
                {phase: means[phase] for phase in STEP_PHASES},
                sum(mean(values) for values in recent.local.values()),
            )
        )
    return sorted(found, key=lambda snapshot: (-snapshot.own_seconds, snapshot.rank))


def mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The mean of what was recorded, or 0."""
    recorded = values[~np.isnan(values)]
    return float(recorded.mean()) if len(recorded) else 0.0
