"""A run's report on the terminal: the verdict, then every figure with its twin. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.io import format_bytes, format_count, format_percent, format_seconds, printable
from meshwright.observe.run_report import Report, ReportRow
from meshwright.observe.terminal import format_ranks
from meshwright.planner.exact.compare import VolumeComparison

BROKEN = "bold red"
FAR = 0.2
"""Errors beyond this stand out."""
UNITS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "B": format_bytes,
    "/s": format_count,
    "share": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:.4g}",
}


def show(report: Report, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    style = BROKEN if report.broken else "yellow" if report.inside is False else "bold green"
    console.print(Text(printable(report.verdict), style), soft_wrap=True)
    of = f"; medians of {report.steps:,} steps" if report.steps else ""
    console.print(Text(printable(f"{report.run}: {report.status}{of}"), "dim"), soft_wrap=True)
    if report.rows:
        console.print(figures(report.rows))
    if report.traffic:
        console.print(Text("\nsent a step, bytes of messages", "bold"))
        console.print(traffic(report.traffic))
    for note in report.notes:
        console.print(Text(printable(note), "yellow"), soft_wrap=True)


def figures(twins: list[ReportRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "", "measured", "predicted", "error", "of"):
        table.add_column(name, justify="left" if name in ("", "of") else "right", overflow="fold")
    before = ""
    for twin in twins:
        form = UNITS[twin.unit]
        measured = form(twin.measured) if twin.measured is not None else "not measured"
        predicted = form(twin.predicted) if twin.predicted is not None else "-"
        far = twin.error is not None and abs(twin.error) > FAR
        table.add_row(
            Text("" if twin.section == before else twin.section, "bold"),
            Text(printable(twin.figure)),
            Text(measured, "" if twin.measured is not None else "dim"),
            predicted,
            Text(format_percent(twin.error, 1, signed=True), "yellow" if far else ""),
            Text(printable(twin.note), "dim"),
        )
        before = twin.section
    return table


def traffic(pairs: list[VolumeComparison]) -> Table:
    """Ranks with the same figures in one row; what is not equal in red."""
    alike: dict[tuple[Any, ...], list[VolumeComparison]] = {}
    for pair in pairs:
        alike.setdefault((not pair.equal, pair.axis, pair.collective, *told(pair), len(pair.ranks)), []).append(pair)
    table = Table(box=None, pad_edge=False)
    for name in ("axis", "collective", "counted", "by the formula", "", "ranks"):
        table.add_column(name, justify="right" if name in ("counted", "by the formula") else "left", overflow="fold")
    for (broken, axis, collective, found, expected, _), same in alike.items():
        ranks = format_ranks(sorted(rank for pair in same for rank in pair.ranks))
        together = " (sums of those that share experts)" if len(same[0].ranks) > 1 else ""
        words = (axis, collective, found, expected, "BROKEN" if broken else "equal", ranks + together)
        table.add_row(*(Text(printable(each)) for each in words), style=BROKEN if broken else "")
    return table


def told(pair: VolumeComparison) -> tuple[str, str]:
    found, expected = (f"{row.message_bytes:,}" if row else "nothing" for row in (pair.measured, pair.predicted))
    return found, expected


def as_json(report: Report) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "run": report.run,
        "status": report.status,
        "attempt": report.attempt,
        "steps": report.steps,
        "inside": report.inside,
        "bytes_equal": not report.broken if report.traffic else None,
        "figures": [asdict(twin) | {"error": twin.error} for twin in report.rows],
        "traffic": [asdict(pair) | {"equal": pair.equal} for pair in report.traffic],
        "notes": report.notes,
    }
