"""A save that is interrupted leaves the old checkpoint, or the new one, and nothing in between."""

from __future__ import annotations

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.rank.interruptions import INTACT
from meshwright_practice.interview.runner import ProbeFailed


def atomic_save(evidence: RunEvidence) -> Check:
    expected = "after a kill at any point of save, load returns the old state or the new one"
    try:
        points = evidence.interrupted_saves
    except ProbeFailed as failed:
        return Check("atomic_save", False, expected, str(failed), "save(path, state) and load(path) must work alone.")
    damaged = [(point, found) for point, found in points if found != INTACT]
    found = f"intact at {len(points)} points" if not damaged else f"killed {damaged[0][0]}: {damaged[0][1]}"
    message = "" if not damaged else "Write to another name, flush and fsync, then os.replace: a name changes at once."
    return Check("atomic_save", not damaged, expected, found, message)
