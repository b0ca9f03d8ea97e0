"""The phases of a step on every rank, as a section of the report. Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.base.history.step_table import StepTable
from meshwright.base.io import format_seconds
from meshwright.insight.report.compared_figures import Measurements, median_of
from meshwright.insight.report.document import Section, Table
from meshwright.insight.report.pictures import PHASE_CLASSES, make_bars, spread

MAX_RANKS = 16
"""The ranks whose phases are drawn and listed."""


def phases_section(measurements: Measurements) -> Section:
    """The median seconds of every phase on every rank; waits for other ranks inside a phase are shown by themselves."""
    steps = {rank: table for rank, table in measurements.steps.items() if len(table)}
    if not steps:
        return Section("Phases", ["No step was timed."])
    slowest = max(steps, key=lambda rank: median_of(steps[rank].local_seconds) or 0.0)
    shown = spread(sorted(steps), MAX_RANKS, [0, slowest])
    rows = {f"rank {rank}": median_seconds(steps[rank]) for rank in shown}
    chart = make_bars("", rows, PHASE_CLASSES, format_seconds, {"wait": "wait for other ranks inside a phase"})
    phases = [phase for phase in PHASE_CLASSES if any(parts[phase] for parts in rows.values())]
    table = Table(
        ("", *("waits inside phases" if phase == "wait" else phase for phase in phases)),
        [[label, *(format_seconds(parts[phase]) for phase in phases)] for label, parts in rows.items()],
    )
    notes = ["Median seconds per step. Sync is exposed communication, and under a pipeline the wait for other stages."]
    if len(shown) < len(steps):
        notes.append(f"{len(shown)} of {len(steps):,} ranks are shown, among them the slowest, rank {slowest}.")
    return Section("Phases", tables=[table], bars=[chart], notes=notes)


def median_seconds(table: StepTable) -> dict[str, float]:
    """Median seconds of a rank in every phase without its waits, and in the waits of all phases but sync."""
    parts = {phase: median_of(column) or 0.0 for phase, column in table.local.items()}
    waits = np.sum([np.nan_to_num(column) for column in table.waits.values()], axis=0)
    parts |= {"sync": median_of(table.phases["sync"]) or 0.0, "wait": median_of(waits) or 0.0}
    return {phase: parts[phase] for phase in PHASE_CLASSES}
