"""The kinds of episodes with their weights, and how one episode is run and reported."""

from __future__ import annotations

import random
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from fuzz.episode import Episode, Workspace
from fuzz.hostile import hostile_file, hostile_folder
from fuzz.oracle import Finding
from fuzz.processes import kill, two_at_once
from fuzz.training import fault, reshard, train

KINDS: dict[str, tuple[int, Callable[[Episode], None]]] = {
    "train": (3, train),
    "fault": (6, fault),
    "kill": (4, kill),
    "reshard": (3, reshard),
    "hostile-folder": (6, hostile_folder),
    "hostile-file": (6, hostile_file),
    "two-at-once": (2, two_at_once),
}
"""Kind -> its weight and its function."""


@dataclass(frozen=True)
class Result:
    """What one episode did and found."""

    number: int
    kind: str
    config: str
    result: str
    seconds: float
    counts: dict[str, int]
    expected: str = ""
    found: str = ""
    commands: list[str] = field(default_factory=list)
    folder: str = ""

    @property
    def is_finding(self) -> bool:
        return bool(self.expected)

    def line(self) -> str:
        result = "FINDING" if self.is_finding else self.result or "ok"
        return f"{self.number:5d} {self.kind:<14} {self.seconds:5.1f} s  {self.config}: {result}"

    def reproduction(self, seed: int, only: str | None) -> str:
        option = f" --only {only}" if only else ""
        return "\n".join(
            [
                f"FINDING in episode {self.number} ({self.kind}, {self.config}: {self.result})",
                f"  expected: {self.expected}",
                f"  found:    {self.found}",
                *(f"  {command}" for command in self.commands),
                f"  folder:   {self.folder}",
                f"  again:    python -m fuzz --replay {seed}:{self.number}{option}",
            ]
        )


def draw_kind(seed: int, number: int) -> str:
    weights = [weight for weight, _ in KINDS.values()]
    return random.Random(f"{seed}/{number}/kind").choices(list(KINDS), weights)[0]


def run_episode(seed: int, number: int, workspace: Workspace, only: str | None = None, verbose: bool = False) -> Result:
    """Runs one episode. Its folder is deleted unless there is a finding."""
    kind = only or draw_kind(seed, number)
    began = time.monotonic()
    episode = Episode(seed, number, kind, workspace, verbose)
    expected = found = ""
    try:
        KINDS[kind][1](episode)
    except Finding as finding:
        expected, found = finding.expected, finding.found
    except Exception:  # noqa: BLE001  an output that the fuzzer cannot interpret is a finding too
        expected, found = "an output that the fuzzer can interpret", traceback.format_exc()[-3000:]
    finally:
        episode.close()
    if not expected:
        shutil.rmtree(episode.folder, ignore_errors=True)
    return Result(
        number,
        kind,
        episode.config,
        episode.result,
        time.monotonic() - began,
        dict(episode.counts),
        expected,
        found,
        episode.commands,
        str(episode.folder),
    )
