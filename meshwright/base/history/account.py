"""The parts of the goodput account, and the account of a run and of its attempts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PARTS = {
    "productive": "forward, backward and update of steps that the run keeps",
    "data": "the training thread waits for samples, or copies them to the device",
    "exposed communication": "rank 0 waits for collectives, without bubble and stragglers",
    "bubble": "the wait that the pipeline schedule predicts",
    "straggler": "the wait for a rank that is slower than the others",
    "checkpoint": "the training thread waits for saves",
    "evaluation": "held-out samples are evaluated",
    "callback": "callbacks run",
    "bookkeeping": "records, counters, profiler, and what else the loop does between two steps",
    "start": "from the start of the command to the first step",
    "compile": "torch.compile: the warm-up backward, and the excess of the first step",
    "skipped": "steps whose update was skipped because values were not finite",
    "lost work": "steps that were run and are not contained in the state that the run continued from",
    "stalled": "no step is completed: a hang until it is found, or a step that takes much longer than those before",
    "restart": "from the last step before a failure to the first step of the next attempt",
    "idle": "no attempt runs, and nobody has restarted the job; or the machine was suspended",
    "end": "from the last step of a finished attempt to the end of its last rank",
}
"""Every part of the account, in the order in which it is shown, with its meaning."""

NANOSECONDS = 10**9


@dataclass
class AttemptAccount:
    """The time of one attempt and what precedes it since the previous one ended."""

    number: int
    began: int
    """nanoseconds, Unix time of the run's first clock"""
    nanoseconds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @property
    def parts(self) -> dict[str, float]:
        return {part: value / NANOSECONDS for part, value in self.nanoseconds.items()}

    @property
    def seconds(self) -> float:
        return sum(self.nanoseconds.values()) / NANOSECONDS


@dataclass(frozen=True)
class GoodputAccount:
    """The account of a run through all attempts."""

    attempts: list[AttemptAccount]
    unique_samples: float
    """samples in the steps that the run keeps"""
    notes: list[str]

    @property
    def nanoseconds(self) -> dict[str, int]:
        """The parts; their sum is the wall time exactly."""
        return {part: sum(account.nanoseconds[part] for account in self.attempts) for part in PARTS}

    @property
    def wall_nanoseconds(self) -> int:
        return sum(self.nanoseconds.values())

    @property
    def wall_seconds(self) -> float:
        return self.wall_nanoseconds / NANOSECONDS

    @property
    def parts(self) -> dict[str, float]:
        return {part: value / NANOSECONDS for part, value in self.nanoseconds.items()}

    @property
    def shares(self) -> dict[str, float]:
        """The parts as shares of the wall time."""
        return {part: value / max(1, self.wall_nanoseconds) for part, value in self.nanoseconds.items()}

    @property
    def samples_per_second(self) -> float:
        """Unique samples that survived, per second of wall time."""
        return self.unique_samples / self.wall_seconds if self.wall_nanoseconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_seconds,
            "parts": self.parts,
            "unique_samples": self.unique_samples,
            "samples_per_second": self.samples_per_second,
            "attempts": [{"attempt": account.number, "parts": account.parts} for account in self.attempts],
            "notes": self.notes,
        }
