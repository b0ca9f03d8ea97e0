"""The run folder: the paths of everything that a run writes. Torch-free."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The paths inside a run folder; `docs/records.md` describes their content."""

    root: Path

    @property
    def run_file(self) -> Path:
        """The resolved config."""
        return self.root / "run.toml"

    @property
    def identity_file(self) -> Path:
        """The identity of the run."""
        return self.root / "identity.json"

    @property
    def plan_file(self) -> Path:
        """The prediction for the newest attempt."""
        return self.root / "plan.json"

    def events(self, rank: int) -> Path:
        """The events of a rank, over all attempts."""
        return self.root / "events" / f"rank-{rank:05d}.jsonl"

    def attempt(self, number: int) -> Path:
        return self.root / "attempts" / f"{number:04d}"

    def incident(self, number: int) -> Path:
        """Why an attempt ended."""
        return self.attempt(number) / "incident.json"

    def heartbeat(self, attempt: int, rank: int) -> Path:
        """The heartbeat of a rank."""
        return self.attempt(attempt) / f"heartbeat-{rank:05d}"

    def log(self, attempt: int, rank: int) -> Path:
        """The output of a rank."""
        return self.attempt(attempt) / f"rank-{rank:05d}.log"

    def last_attempt(self) -> int:
        """The number of the newest attempt, or 0."""
        return max(self.attempts(), default=0)

    def attempts(self) -> list[int]:
        """The numbers of the attempts that have a folder, in order."""
        names = [path.name for path in (self.root / "attempts").glob("[0-9]*")]
        return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{4,9}", name))

    def set_aside(self) -> None:
        """Renames the folder to the first free NAME.old-K beside it; nothing is deleted."""
        root = self.root.resolve()
        if root.exists():
            number = 1
            while (target := root.with_name(f"{root.name}.old-{number}")).exists():
                number += 1
            os.rename(root, target)
