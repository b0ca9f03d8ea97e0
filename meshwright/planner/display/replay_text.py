"""Shows the planner's error on published runs: one row per source, and one for all sources together."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.base.hardware.cluster import ASSUMED_RATE
from meshwright.base.io import format_number_of, format_percent, printable
from meshwright.base.terminal.console import make_console
from meshwright.planner.calibration.published.published_runs import NOT_VALID

MAX_SOURCE_LENGTH = 60
MAX_REASONS = 5
"""Records that are not valid of which the reason is shown; --json gives all."""
TOTALS = ("fully stated", "all")
"""Rows over all sources, in bold."""
TIME_CAPTION = "Errors are absolute errors of the step time. Inside: runs within their 80 % interval."
LEFT_OUT_CAPTION = (
    " Source, device left out: the median error with constants of trainers that are fitted without the source, or "
    "without the device and others of its chip, of each run. Not left out: the sustained fraction of a device that "
    "another source used as well, and constants of MoE layers by release."
)
MEMORY_CAPTION = (
    "Bias: the median signed error. OOM found: runs that ran out of memory, and were predicted not to fit. False OOM: "
    "runs that ran, and were predicted not to fit, without those whose activation checkpointing, offload or sharding "
    "was assumed to be what fits. Sweeps are runs of the same work on different layouts: rank "
    "correlation (Kendall tau) of predicted and measured step time, and regret, the extra time of the layout that was "
    "predicted to be the fastest; both are means over sweeps."
)


def show_replay(replayed: dict[str, Any], console: Console | None = None) -> None:
    """Prints the scores of `replay`; they are readable on a terminal of 80 columns."""
    console = console or make_console()
    scores = replayed["scores"]
    console.print(time_table(scores))
    console.print()
    console.print(memory_table(scores))
    console.print()
    runs, left_out = format_number_of(len(replayed["records"]), "run"), replayed["left_out"]
    console.print(f"[dim]{runs} predicted, {len(left_out)} excluded (--json gives the reasons)[/]")
    derived = dict.fromkeys(text for record in replayed["records"] for text in record["derived"])
    for rate in (text for text in derived if text.startswith(ASSUMED_RATE)):
        console.print(Text(printable(rate)), style="yellow")
    not_valid = {name: reason for name, reason in left_out.items() if reason.startswith(NOT_VALID)}
    for name, reason in [*not_valid.items()][:MAX_REASONS]:
        console.print(Text(printable(f"{name[:MAX_SOURCE_LENGTH]}: {reason}")), style="dim")
    if len(not_valid) > MAX_REASONS:
        console.print(f"[dim]{len(not_valid) - MAX_REASONS} more records are not valid[/]")


def time_table(scores: list[dict[str, Any]]) -> Table:
    """Builds the table of step-time errors."""
    leaves_out = any(score["source_left_out"] is not None for score in scores)
    headings = ["timed\nruns", "median\nerror", "90th\npercentile", "inside\n80 %\ninterval"]
    keys = ["median", "percentile_90", "inside"]
    if leaves_out:
        headings += ["source\nleft\nout", "device\nleft\nout"]
        keys += ["source_left_out", "device_left_out"]
    else:
        headings.append("mean\nerror")
        keys.append("mean")
    caption = TIME_CAPTION + (LEFT_OUT_CAPTION if leaves_out else "")
    table = score_table("Step time: predicted against measured", caption, tuple(headings))
    for score in scores:
        add_score(table, score, str(score["timed"]), *(format_error(score[key]) for key in keys))
    return table


def memory_table(scores: list[dict[str, Any]]) -> Table:
    """Builds the table of memory errors and of how well layouts are ranked."""
    headings = (
        "memory\nmedian\nerror",
        "90th\nperc.",
        "bias",
        "OOM\nfound",
        "false\nOOM",
        "sweeps",
        "rank\ncorr.\n(tau)",
        "regret",
    )
    table = score_table("Memory and ranking of layouts", MEMORY_CAPTION, headings)
    for score in scores:
        out_of_memory, completed = score["out_of_memory"], score["completed_runs"]
        if not (score["memory_runs"] or out_of_memory or completed or score["sweeps"]):
            continue
        add_score(
            table,
            score,
            format_error(score["memory_median"]),
            format_error(score["memory_percentile_90"]),
            format_error(score["memory_bias"]),
            f"{score['out_of_memory_found']}/{out_of_memory}" if out_of_memory else "",
            f"{score['false_out_of_memory']}/{completed}" if completed else "",
            str(score["sweeps"] or ""),
            "" if score["tau"] is None else f"{score['tau']:.2f}",
            format_error(score["regret"]),
        )
    return table


def score_table(title: str, caption: str, headings: tuple[str, ...]) -> Table:
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("source", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold", min_width=max(map(len, heading.split("\n"))))
    return table


def add_score(table: Table, score: dict[str, Any], *cells: str) -> None:
    source = Text(printable(score["source"])[:MAX_SOURCE_LENGTH])
    table.add_row(source, *cells, style="bold" if score["source"] in TOTALS else "")


def format_error(fraction: float | None) -> str:
    """Formats a fraction with one decimal; empty if there is none."""
    return "" if fraction is None else format_percent(fraction, 1)
