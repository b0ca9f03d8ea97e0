"""Writes the merged trace of a run to a file, and says in words what it contains."""

from __future__ import annotations

import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from meshwright.base.config.constraints import parse_step_ranges
from meshwright.base.io import format_seconds, output_file, write_output
from meshwright.base.records.run_folder import RunFolder, require_kind
from meshwright.errors import ConfigError
from meshwright.insight.trace.exposed_time import exposed_by_axis
from meshwright.insight.trace.merge import MergedTrace

MAX_MERGED_STEPS = 20_000
"""Steps of one merged trace: more of them do not fit into the memory of a viewer."""


@dataclass(frozen=True)
class TraceSummary:
    """What a merged trace contains."""

    file: str
    ranks: int
    steps: int
    events: int
    links: int
    """arrows from a rank that waited to the rank that it waited for"""
    exposed_seconds: dict[str, float]
    """axis -> exposed communication of the profiled steps, mean over ranks and steps"""
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        counts = {"rank": self.ranks, "step": self.steps, "event": self.events, "link": self.links}
        lines = [f"{self.file}: " + ", ".join(f"{n:,} {name}{'s' if n != 1 else ''}" for name, n in counts.items())]
        if self.exposed_seconds:
            parts = (f"{axis} {format_seconds(seconds)}" for axis, seconds in self.exposed_seconds.items())
            lines.append(f"exposed communication of profiled steps, mean per step and rank: {', '.join(parts)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def write_trace(run: Path, steps: str | None = None, out: Path | None = None) -> TraceSummary:
    """Writes the merged trace of a run; by default into its folder."""
    folder = RunFolder(run)
    folder.require_own_folders()
    ranges = parse_step_ranges(steps, "--steps", MAX_MERGED_STEPS) if steps is not None else []
    if steps is not None and len(ranges) != 1:
        raise ConfigError(f"--steps = {steps[:80]!r} is not one range", "expected FIRST:END, such as 10:13")
    require_kind(folder.merged_trace, stat.S_ISREG, "a regular file")  # a link in it could lead to any file of the user
    file = output_file(out, "--out") if out is not None else folder.merged_trace
    merged = MergedTrace(folder, ranges[0] if ranges else None)
    write_output(file, merged.lines(), "--out")
    return TraceSummary(
        str(out or file),
        len(merged.ranks),
        len(merged.steps),
        merged.writer.events,
        merged.writer.links,
        mean_exposed(folder) if merged.profiles and len(merged.ranks) > 1 else {},
        merged.notes,
    )


def mean_exposed(folder: RunFolder) -> dict[str, float]:
    """Returns the exposed communication of profiled steps by axis, the largest first."""
    steps = exposed_by_axis(folder)
    axes = {axis for step in steps for axis in step.seconds}
    means = {axis: mean(step.seconds.get(axis, 0.0) for step in steps) for axis in axes}
    return dict(sorted(means.items(), key=lambda item: -item[1]))
