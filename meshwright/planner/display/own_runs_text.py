"""Shows the error of the predictions of one's own runs, before and after corrections."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.base.io import format_number_of, format_percent, printable
from meshwright.base.terminal.console import make_console

MAX_ROWS = 40
"""Runs that are shown; --json gives all."""
MAX_NAME_LENGTH = 24
CAPTION = (
    "Error: predicted / measured - 1. Corrected: by the other runs of the same host and device, of which the number of "
    "similar ones is given; a run does not correct itself."
)


def show_own_runs(replayed: dict[str, Any], console: Console | None = None) -> None:
    """Prints one row per run and the errors of all; they are readable on a terminal of 80 columns."""
    console = console or make_console()
    console.print(run_table(replayed["records"]))
    console.print()
    console.print(score_table(replayed["scores"]))
    left_out = replayed["left_out"]
    hidden = max(0, len(replayed["records"]) - MAX_ROWS)
    runs, machines = (
        format_number_of(len(replayed["records"]), "run"),
        format_number_of(replayed["machines"], "machine"),
    )
    console.print(
        f"[dim]{runs} on {machines}, {len(left_out)} excluded, "
        f"{hidden} not shown (--json gives all, and the reasons)[/]"
    )
    for note in replayed["notes"]:
        console.print(f"[dim]{note}[/]")


def run_table(records: list[dict[str, Any]]) -> Table:
    table = Table(title="Own runs: predicted against measured", caption=CAPTION, caption_justify="left")
    for heading in ("run", "step time\nerror", "corrected", "by\nruns", "memory\nerror", "corrected", "by\nruns"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for record in records[:MAX_ROWS]:
        name = Text(printable(record["id"])[:MAX_NAME_LENGTH])
        table.add_row(name, *figure_cells(record["seconds"]), *figure_cells(record["memory"]))
    return table


def figure_cells(figure: dict[str, Any] | None) -> tuple[str, str, str]:
    if figure is None:
        return "", "", ""
    error, corrected = (format_percent(figure[key], 1, signed=True) for key in ("error", "corrected_error"))
    return error, corrected, str(figure["runs"])


def score_table(scores: list[dict[str, Any]]) -> Table:
    table = Table(title="Errors of all runs, without sign")
    for heading in ("figure", "runs", "corrected\nruns", "median\nbefore", "after", "90th percentile\nbefore", "after"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for score in scores:
        errors = (score[key][name] for name in ("median", "percentile_90") for key in ("before", "after"))
        table.add_row(
            {"seconds": "step time"}.get(score["figure"], score["figure"]),
            str(score["runs"]),
            str(score["corrected_runs"]),
            *(format_percent(error, 1) for error in errors),
        )
    return table
