"""What a practice incident is: drawn from a seed, it says what the job does, and what is true of it. Torch-free."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import atomic_write, parse_json, read_regular_file
from meshwright.errors import ConfigError

FORMAT = 1
SEAL_FILE = "sealed.txt"
MAX_SEAL_BYTES = 4096
MIN_STEPS, DEFAULT_STEPS, MAX_STEPS = 40, 400, 5000
"""Limits of the steps of a job. The default lasts about a minute on two cores."""
MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class TrainRun:
    """An act of the job: train in the run folder, which resumes what is in it."""

    settings: tuple[str, ...]
    """config keys as on the command line"""
    fault: str = ""
    """faults of `meshwright/core/faults.py`, which the launcher assigns inside its process"""
    part: str = ""
    """the parts of `parts.py` that the run trains with; empty: the built-in model"""
    fork: bool = False


@dataclass(frozen=True)
class TrainOnHosts:
    """An act of the job: train on hosts that this machine represents, and lose one of them."""

    settings: tuple[str, ...]
    lost: str
    """the host whose processes are killed"""
    step: int
    """the step after which that happens"""


@dataclass(frozen=True)
class DeleteCheckpoints:
    """An act of the job: delete the checkpoints after a step, as a clean-up of the disk does."""

    after: int


@dataclass(frozen=True)
class DamageCheckpoint:
    """An act of the job: invert one byte in the shard of a rank of the newest checkpoint."""

    rank: int


Act = TrainRun | TrainOnHosts | DeleteCheckpoints | DamageCheckpoint


@dataclass(frozen=True)
class Arrangement:
    """What a class draws: the acts of the job, and where the fault is."""

    acts: tuple[Act, ...]
    rank: int | None = None
    """the rank at fault; None if no single one is"""
    steps: tuple[int, int] | None = None
    """the first and the last step that count as the step of the fault; None if it has none"""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """further values, for the texts of the story"""


@dataclass(frozen=True)
class Move:
    """One step of the right reasoning."""

    symptom: str
    interpretation: str
    next_step: str


@dataclass(frozen=True)
class IncidentClass:
    """A kind of fault. Texts may refer to {rank}, {step}, {ranks} and the parameters of an arrangement."""

    name: str
    meaning: str
    """the line in the list of answers"""
    draw: Callable[[Random, int], Arrangement]
    page: str
    """what the pager says: symptoms only"""
    fix: str
    """a key of `FIXES`"""
    story: str
    """what the job really did"""
    evidence: tuple[str, ...]
    """patterns of lines that the product prints and that show the fault"""
    cause: str
    """what `diagnose` says first; empty where its records cannot show the fault"""
    shown_by: str
    """the command or the record that shows the fault best"""
    hints: tuple[str, str, str]
    path: tuple[Move, ...]
    read: tuple[str, ...]
    """cards, which `practice cards --show` prints, and sections of the handbook"""
    par: float = 300.0
    """seconds within which an answer costs nothing"""
    observed_step: Callable[[RunHistory], int | None] | None = None
    """reads the step from the records, where it follows from events that no setting determines"""


@dataclass(frozen=True)
class PracticeIncident:
    """One incident: its seed decides the class and all parameters."""

    seed: int
    kind: IncidentClass
    steps: int
    arrangement: Arrangement

    @property
    def values(self) -> dict[str, Any]:
        """What the texts of the class refer to."""
        window = self.arrangement.steps or (0, 0)
        rank = "none" if self.arrangement.rank is None else self.arrangement.rank
        return {"rank": rank, "step": window[0], **self.arrangement.parameters}

    def text(self, template: str) -> str:
        return template.format(**self.values)

    def step_window(self, history: RunHistory | None) -> tuple[int, int] | None:
        """The steps that an answer may name: those that were drawn, or those on record where the class reads them."""
        if self.kind.observed_step is not None and history is not None:
            step = self.kind.observed_step(history)
            if step is not None:
                return max(0, step - 2), step + 2
        return self.arrangement.steps


def draw_incident(
    seed: int, classes: Mapping[str, IncidentClass], name: str | None = None, steps: int = DEFAULT_STEPS
) -> PracticeIncident:
    """Draws the incident of a seed. Without `name`, the seed decides the class, too."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed {seed} is out of range", f"expected 0 to {MAX_SEED}")
    if not MIN_STEPS <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps {steps} is out of range", f"expected {MIN_STEPS} to {MAX_STEPS}")
    if name is not None and name not in classes:
        raise ConfigError(f"--class {name!r} is not a class of incidents", f"expected one of {', '.join(classes)}")
    name = name or Random(f"class/{seed}").choice(sorted(classes))
    kind = classes[name]
    return PracticeIncident(seed, kind, steps, kind.draw(Random(f"{name}/{seed}/{steps}"), steps))


def write_seal(folder: Path, incident: PracticeIncident) -> None:
    """Writes which incident the folder has, so that it is not read by accident."""
    value = {"format": FORMAT, "seed": incident.seed, "class": incident.kind.name, "steps": incident.steps}
    content = json.dumps(value).encode()
    atomic_write(folder / SEAL_FILE, f"{base64.b64encode(content).decode()}\n{digest(content)}\n")


def read_seal(folder: Path, classes: Mapping[str, IncidentClass]) -> PracticeIncident:
    """Reads what `write_seal` wrote. Raises ConfigError if the file is missing or damaged."""
    path, expected = folder / SEAL_FILE, "the file as `meshwright practice incident` wrote it"
    lines = read_regular_file(path, MAX_SEAL_BYTES, str(path), expected).split()
    damaged = ConfigError(f"{path} is damaged", f"expected {expected}")
    try:
        content = base64.b64decode(lines[0], validate=True)
        if digest(content) != lines[1].decode():
            raise damaged
        value = parse_json(content, str(path), expected)
        if value["format"] != FORMAT:
            raise damaged
        return draw_incident(int(value["seed"]), classes, str(value["class"]), int(value["steps"]))
    except (ValueError, IndexError, KeyError, TypeError):
        raise damaged from None


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
