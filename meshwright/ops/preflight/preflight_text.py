"""A preflight on the terminal: one line per check, then the findings with what to do. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.base.io import format_seconds, printable
from meshwright.base.terminal.console import make_console
from meshwright.ops.preflight.report import SEVERITY, PreflightReport, PreflightRow

STYLES = {"ok": "green", "slow": "bold yellow", "differs": "bold yellow", "broken": "bold red"}
SUMMARIES = {"versions": "the same on every host", "clock": "the same on every host", "limits": "large enough"}
"""Check -> what its rows expect together."""
FINGERPRINTS = ("code", "config")
"""Components whose values tell nothing if they agree."""
MAX_FINDINGS = 20
"""Findings that are shown; --json lists all."""


def show_preflight(report: PreflightReport, console: Console | None = None) -> None:
    """Prints what was checked, the findings, and the hosts to leave out."""
    console = console or make_console()
    measured = report.measurements
    title = f"{count(len(measured.hosts), 'host')}, {count(len(measured.ranks), 'rank')}"
    console.print(Text(f"{title}, checked in {format_seconds(measured.seconds)}", "bold"))
    console.print(check_table(report.rows))
    findings = report.findings
    for row in findings[:MAX_FINDINGS]:
        show_finding(row, console)
    if len(findings) > MAX_FINDINGS:
        console.print(Text(f"and {len(findings) - MAX_FINDINGS} more findings; --json lists all", "dim"))
    if report.suspect_hosts:
        console.print(Text(printable(f"hosts to leave out: {', '.join(report.suspect_hosts)}"), "bold"))
    elif not findings:
        console.print(Text("nothing is slow, broken or different", "bold green"))
    for remark in report.remarks:
        console.print(Text(printable(f"note: {remark}"), "dim"))


def check_table(rows: Sequence[PreflightRow]) -> Table:
    """One line per figure: the row with the worst verdict. Components, clocks and limits that are ok share a line."""
    table = Table("check", "figure", "expected", "found", "verdict", box=box.SIMPLE, pad_edge=False)
    for check in dict.fromkeys(row.check for row in rows):
        own = [row for row in rows if row.check == check]
        if check in SUMMARIES and all(row.verdict == "ok" for row in own):
            found = {row.name: row.found for row in own if row.name not in FINGERPRINTS}
            text = ", ".join(f"{name} {value}" for name, value in found.items())
            add_line(table, check, ", ".join(dict.fromkeys(row.name for row in own)), SUMMARIES[check], text, "ok")
            continue
        for name in dict.fromkeys(row.name for row in own):
            same = [row for row in own if row.name == name]
            worst = min(same, key=lambda row: SEVERITY.index(row.verdict))
            failed = sum(row.verdict != "ok" for row in same)
            places = f" ({failed} of {len(same)})" if failed and len(same) > 1 else ""
            add_line(table, check, name, worst.expected, worst.found, worst.verdict, places)
    return table


def add_line(table: Table, check: str, figure: str, expected: str, found: str, verdict: str, places: str = "") -> None:
    cells = (Text(printable(text)) for text in (check, figure, expected, found))
    table.add_row(*cells, Text(verdict + places, STYLES[verdict]))


def show_finding(row: PreflightRow, console: Console) -> None:
    """Prints where, what was expected and found, and the next move."""
    head = Text().append(row.verdict, STYLES[row.verdict])
    head.append(printable(f"  {row.where}: {row.name}"), "bold")
    console.print(head)
    console.print(Text(printable(f"  expected {row.expected}, found {row.found}")))
    console.print(Text(printable(f"  {row.recommendation}"), "cyan"))


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
