"""What every run must satisfy: documented exit codes, no traceback, nothing left behind, and the expected numbers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.jobs import Ended
from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.unsharded import state_digest

DOCUMENTED_CODES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
LOSS_TOLERANCE = 1e-9
"""Relative difference of float64 losses on two layouts: sums have another order, and a few steps amplify that."""
MAX_FOUND = 4000
"""Characters of a finding that are printed."""
TRACEBACK = "Traceback (most recent call last)"
ABORTED = "Fatal Python error: Aborted"
CRASH = re.compile(rf"^({re.escape(TRACEBACK)}|Fatal Python error|Exception ignored)", re.MULTILINE)


class Finding(Exception):
    """The product did not do what was expected."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(f"expected {expected}, found {found}")


def expect(condition: bool, expected: str, found: Any) -> None:
    if not condition:
        raise Finding(expected, str(found)[:MAX_FOUND])


@dataclass(frozen=True)
class Outcome:
    """The numbers of a complete run."""

    losses: dict[int, float]
    parameters: str
    """Digest of the parameters, as the run itself reports it."""
    state: str
    """Digest of the newest checkpoint: parameters, buffers and optimizer state."""


def read_outcome(folder: Path, output: str) -> Outcome:
    """The outcome of a complete run, from its folder and from the events that its last job printed."""
    run = RunFolder(folder)
    losses = {event["step"]: event["loss"] for event in read_events(run.events(0)) if event.get("kind") == "step"}
    entries = list_published(open_run_store(run))
    return Outcome(losses, reported_digest(output), state_digest(entries[0]) if entries else "no checkpoint")


def reported_digest(output: str) -> str:
    """The digest of the parameters in the last `end` event of a job's output, or '' if the run did not end."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"kind": "end"'):
            return str(json.loads(line)["parameters_digest"])
    return ""


def check_same(found: Outcome, expected: Outcome) -> None:
    """Every step is recorded once, and losses and final state are bitwise those of an undisturbed run."""
    check_same_steps(found.losses, expected.losses)
    different = [step for step in expected.losses if found.losses[step] != expected.losses[step]]
    expect(
        not different,
        f"bitwise the losses of an undisturbed run, {[expected.losses[step] for step in different]} at {different}",
        [found.losses[step] for step in different],
    )
    expect(found.parameters == expected.parameters, f"parameters {expected.parameters}", found.parameters)
    expect(found.state == expected.state, f"state digest {expected.state[:16]}", found.state[:16])


def check_same_steps(found: dict[int, float], expected: dict[int, float]) -> None:
    expect(found.keys() == expected.keys(), f"records of the steps {sorted(expected)}", sorted(found))


def check_close(found: dict[int, float], expected: dict[int, float]) -> None:
    """The losses are those of one rank, within the rounding of float64."""
    check_same_steps(found, expected)
    for step, loss in expected.items():
        error = abs(found[step] - loss) / max(abs(loss), 1e-300)
        expect(error <= LOSS_TOLERANCE, f"loss {loss!r} of one rank at step {step}", f"{found[step]!r} ({error:.2g})")


def check_ended(ended: Ended, codes: tuple[int, ...], hostile: bool = False) -> None:
    """The exit code is one of `codes` and nothing crashed. With hostile input, not even a rank may raise an error that
    is not one of Meshwright's own.
    """
    tail = "\n".join(line[:400] for line in ended.output.strip().splitlines()[-8:])
    stacks = ended.output[max(0, ended.output.find(ABORTED)) :]
    expect(not ended.timed_out, "an end within the time limit", f"a job that runs for {ended.seconds:.0f} s: {stacks}")
    expect(ended.code in codes, f"exit code {' or '.join(map(str, codes))}", f"{ended.code}: {tail}")
    crash = CRASH.search(ended.output)
    expect(crash is None, "no traceback", crash and ended.output[crash.start() :][:3000])
    if hostile:
        expect(TRACEBACK not in ended.output, "no unexpected error on a rank", tail)


def check_temporary_folder(folder: Path) -> None:
    """No launch has left its temporary folder behind."""
    left = sorted(path.name for path in folder.glob("meshwright-*"))
    expect(not left, "no temporary folder of Meshwright", left)


def tree_digest(root: Path) -> str:
    """A digest of the names, types, permissions and contents below a folder; links are not followed."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = Path(folder, name)
            status = path.lstat()
            digest.update(f"{path.relative_to(root)} {status.st_mode:o}".encode(errors="surrogateescape"))
            if path.is_file() and not path.is_symlink():
                digest.update(path.read_bytes())
    return digest.hexdigest()
