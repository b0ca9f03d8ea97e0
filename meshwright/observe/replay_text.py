"""How wrong the planner is, as a table: one line a source, and one for all."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.io import format_percent, printable


def show_replay(found: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    console.print(table_of(found["scores"]))
    console.print(
        f"[dim]{len(found['records'])} runs predicted, {len(found['left_out'])} left out (--json says why)[/]"
    )


def table_of(scores: list[dict[str, Any]]) -> Table:
    table = Table(
        title="predicted against measured",
        caption="alone: with the constants of other software; inside: in intervals of four in five; wrongly: ran, and"
        " said not to fit; tau, regret: means over sweeps",
    )
    table.add_column("source")
    for name in (
        "runs",
        "median",
        "90th",
        "mean",
        "alone",
        "inside",
        "memory",
        "90th",
        "oom",
        "wrongly",
        "sweeps",
        "tau",
        "regret",
    ):
        table.add_column(name, justify="right")
    for one in scores:
        totals = one["source"] in ("fully stated", "all")
        oom = f"{one['oom_right']}/{one['oom']}" if one["oom"] else ""
        table.add_row(
            Text(printable(one["source"])[:60]),
            str(one["timed"]),
            *(format_percent(one[key], 1) for key in ("median", "ninth", "mean", "alone", "inside")),
            *(format_percent(one[key], 1) for key in ("memory_median", "memory_ninth")),
            oom,
            str(one["wrongly"] or ""),
            str(one["sweeps"] or ""),
            "" if one["tau"] is None else f"{one['tau']:.2f}",
            format_percent(one["regret"], 1),
            style="bold" if totals else "",
        )
    return table
