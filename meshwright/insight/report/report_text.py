"""The report of a run on the terminal: the verdict, then every figure next to its prediction. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.base.history.goodput import goodput
from meshwright.base.history.signals import read_signals
from meshwright.base.io import format_bytes, format_count, format_percent, format_seconds, printable
from meshwright.base.terminal.console import make_console
from meshwright.base.terminal.run_header import format_ranks
from meshwright.insight.report.compared_figures import ReportRow, mean_of
from meshwright.insight.report.headlines import headlines
from meshwright.insight.report.profiled_steps import profiled_exposure
from meshwright.insight.report.run_report import Report
from meshwright.insight.terminal.rollout_text import account_lines
from meshwright.planner.cost.compare_volumes import VolumeComparison

MISMATCH_STYLE = "bold red"
DIFFERENT = "DIFFERENT"
"""Marks collectives whose counted bytes differ from the predicted ones."""
LARGE_ERROR = 0.2
"""Errors beyond this fraction are highlighted."""
WIDE = 110
"""The width from which on notes have a column of their own; on narrower terminals they follow their row."""
UNITS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "B": format_bytes,
    "/s": format_count,
    "share": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:.4g}",
}


def show_report(report: Report, console: Console | None = None) -> None:
    console = console or make_console()
    style = MISMATCH_STYLE if report.mismatches else "yellow" if report.within_interval is False else "bold green"
    console.print(Text(printable(report.verdict), style))
    medians = f"; medians of {report.steps:,} steps" if report.steps else ""
    console.print(Text(printable(f"{report.run}: {report.status}{medians}"), "dim"))
    if report.history is not None:
        for headline in headlines(read_signals(report.history, time.time())):
            facts = ", ".join(f"{name} {value}" for name, value in headline.facts)
            console.print(Text(printable(f"{headline.name}: {headline.figure}; {facts}")))
    if report.history is not None and report.history.rollouts.counts is not None:
        console.print(Text("\nRollouts", "bold"))
        for line in account_lines(report.history.rollouts.counts.to_json()):
            console.print(Text(line))
    if report.rows:
        console.print()
        console.print(figure_table(report.rows, console.width))
    if report.communication:
        console.print(Text("\nCommunication volume per step, message bytes", "bold"))
        console.print(communication_table(report.communication))
    for note in report.notes:
        console.print(Text(printable(f"note: {note}"), "yellow"))


def figure_table(rows: list[ReportRow], width: int) -> Table:
    """Builds the table of figures; its notes are a column of their own if the terminal is wide enough."""
    headings = ["", "", "measured", "predicted", "error"] + (["note"] if width >= WIDE else [])
    table = Table(box=None, pad_edge=False)
    for position, name in enumerate(headings):
        table.add_column(name, justify="right" if 2 <= position <= 4 else "left", overflow="fold")
    section = ""
    for row in rows:
        form = UNITS[row.unit]
        measured = form(row.measured) if row.measured is not None else "not measured"
        predicted = form(row.predicted) if row.predicted is not None else "-"
        large = row.error is not None and abs(row.error) > LARGE_ERROR
        figure, note = Text(printable(row.figure)), Text(printable(row.note), "dim")
        cells = [
            Text("" if row.section == section else row.section, "bold"),
            figure if width >= WIDE or not row.note else figure.append("\n").append_text(note),
            Text(measured, "" if row.measured is not None else "dim"),
            Text(predicted),
            Text(format_percent(row.error, 1, signed=True), "yellow" if large else ""),
        ]
        table.add_row(*cells, *([note] if width >= WIDE else []))
        section = row.section
    return table


def communication_table(comparisons: list[VolumeComparison]) -> Table:
    """Builds the table of the collectives; mismatches are red."""
    table = Table(box=None, pad_edge=False)
    for name in ("axis", "collective", "measured", "predicted", "", "ranks"):
        table.add_column(name, justify="right" if name in ("measured", "predicted") else "left", overflow="fold")
    for cells in communication_groups(comparisons):
        style = MISMATCH_STYLE if cells[4] == DIFFERENT else ""
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return table


def communication_groups(comparisons: list[VolumeComparison]) -> list[list[str]]:
    """Returns axis, collective, measured and predicted bytes, whether they are equal, and the ranks that share them."""
    groups: dict[tuple[Any, ...], list[VolumeComparison]] = {}
    for row in comparisons:
        key = (not row.equal, row.axis, row.collective, *message_bytes(row), len(row.ranks))
        groups.setdefault(key, []).append(row)
    listed = []
    for (differs, axis, collective, measured, predicted, _), rows in groups.items():
        ranks = format_ranks(sorted(rank for row in rows for rank in row.ranks))
        summed = " (sum over the expert group)" if len(rows[0].ranks) > 1 else ""
        listed.append([axis, collective, measured, predicted, DIFFERENT if differs else "equal", ranks + summed])
    return listed


def message_bytes(row: VolumeComparison) -> tuple[str, str]:
    measured, predicted = (
        f"{volume.message_bytes:,}" if volume else "none" for volume in (row.measured, row.predicted)
    )
    return measured, predicted


def report_json(report: Report) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "run": report.run,
        "status": report.status,
        "attempt": report.attempt,
        "steps": report.steps,
        "within_interval": report.within_interval,
        "bytes_equal": not report.mismatches if report.communication else None,
        "figures": [asdict(row) | {"error": row.error} for row in report.rows],
        "communication": [asdict(row) | {"equal": row.equal} for row in report.communication],
        "notes": report.notes,
        "other_machine": report.other_machine,
        **history_json(report, time.time()),
    }


def history_json(report: Report, now: float) -> dict[str, Any]:
    """The headline signals, the goodput account, and the exposed communication of rank 0: means by phase and, of
    profiled steps, by axis.
    """
    if report.history is None:
        return {}
    steps = report.measurements.steps.get(0) if report.measurements is not None else None
    exposed = None
    if steps is not None and len(steps):
        by_phase = {"sync": steps.phases["sync"], **steps.waits}
        exposed = {
            "seconds": mean_of(steps.exposed),
            "source": steps.exposed_source,
            "by_phase": {phase: mean_of(column) for phase, column in by_phase.items()},
            "by_axis": profiled_exposure(report.history.folder)[1] or None,
        }
    return {
        "signals": read_signals(report.history, now).to_json(),
        "goodput": goodput(report.history, now).to_json(),
        "exposed": exposed,
    }
