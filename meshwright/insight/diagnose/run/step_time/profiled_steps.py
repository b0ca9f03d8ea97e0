"""What the profile of a few steps shows of a run's devices: kernels, launches and allocations. Torch-free."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

from meshwright.base.history.run_history import RunHistory
from meshwright.errors import MeshwrightError
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.trace.diagnose import diagnose_traces

PROFILE = re.compile(r"rank-(\d{5,7})\.steps-(\d{1,12})-(\d{1,12})\.a(\d{4,7})\.json\.gz")
ProfileVersions = dict[Path, tuple[int, int]]
"""profile -> when it was written, and its size"""
MAX_PROFILES = 16
"""Ranks whose profiles are read."""
CAUSES_OF_DEVICES = ("device", "memory")
"""Causes that only a profile shows; the records of all steps tell more about the others."""


_NEWEST: WeakKeyDictionary[RunHistory, tuple[ProfileVersions, list[Finding]]] = WeakKeyDictionary()
"""History -> its newest profiles when they were diagnosed, and the findings: the page asks again after every step."""


def find(history: RunHistory) -> Iterator[Finding]:
    profiles = newest_profiles(history.folder.trace)
    known = _NEWEST.get(history)
    if known is None or known[0] != profiles:
        known = _NEWEST[history] = profiles, list(diagnose_profiles(list(profiles)))
    yield from known[1]


def diagnose_profiles(paths: list[Path]) -> Iterator[Finding]:
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


def newest_profiles(folder: Path) -> ProfileVersions:
    """The profiles of the newest attempt's last profiled steps, one per rank. Links are left out: the folder may come
    from somebody else.
    """
    found: dict[tuple[int, int], dict[int, Path]] = {}
    with suppress(OSError):  # the folder was renamed at this moment
        for path in folder.iterdir() if folder.is_dir() else ():
            if match := PROFILE.fullmatch(path.name):
                rank, start, _, attempt = map(int, match.groups())
                found.setdefault((attempt, start), {})[rank] = path
        newest = found[max(found)] if found else {}
        profiles = ((newest[rank], newest[rank].lstat()) for rank in sorted(newest)[:MAX_PROFILES])
        return {path: (status.st_mtime_ns, status.st_size) for path, status in profiles if stat.S_ISREG(status.st_mode)}
    return {}
