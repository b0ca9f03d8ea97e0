"""What the profile of a few steps shows of a run's devices: kernels, launches and allocations. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshwright.diagnose.finding import Finding
from meshwright.diagnose.trace.diagnose import diagnose_traces
from meshwright.errors import MeshwrightError
from meshwright.history.run_history import RunHistory

PROFILE = re.compile(r"rank-(\d{5,7})\.steps-(\d{1,12})-(\d{1,12})\.a(\d{4,7})\.json\.gz")
MAX_PROFILES = 16
"""Ranks whose profiles are read."""
CAUSES_OF_DEVICES = ("device", "memory")
"""Causes that only a profile shows; the records of all steps tell more about the others."""


def find(history: RunHistory) -> Iterator[Finding]:
    paths = newest_profiles(history.folder.trace)
    if not paths:
        return
    try:
        diagnosis = diagnose_traces(paths)
    except MeshwrightError:  # a profile that was cut off, or is none
        return
    if all(rank.device == "host" for rank in diagnosis.ranks):
        return
    for finding in diagnosis.findings:
        if finding.cause in CAUSES_OF_DEVICES:
            yield replace(finding, sentence=f"In the profiled steps: {finding.sentence}")


def newest_profiles(folder: Path) -> list[Path]:
    """The profiles of the newest attempt's last profiled steps, one per rank."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := PROFILE.fullmatch(path.name):
            rank, start, _, attempt = map(int, match.groups())
            found.setdefault((attempt, start), {})[rank] = path
    newest = found[max(found)] if found else {}
    return [newest[rank] for rank in sorted(newest)[:MAX_PROFILES]]
