"""A simulation on the terminal: of every chosen rank what it sends and what it holds. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from meshwright.io import format_bytes
from meshwright.observe.schedule_text import ends_of

if TYPE_CHECKING:
    from meshwright.simulator.result import RankResult, Simulation


def show(simulation: Simulation) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    say = console.print
    say(f"{simulation.layout} = {simulation.ranks:,} ranks; {simulation.parameters:,} parameters", highlight=False)
    say(simulation.batch, highlight=False)
    if simulation.schedule:
        live = " ".join(map(str, ends_of(simulation.live)))
        say(f"pipeline by {simulation.schedule}: micro-batches held at once, by rank: {live}", highlight=False)
    for rank in simulation.found:
        say()
        say(title(rank), style="bold", highlight=False)
        say(traffic_table(rank))
        say(memory_table(rank))
        for line in rank.multiplied:
            say(line, style="dim", highlight=False)
    say()
    for note in simulation.notes:
        say(note, style="dim", highlight=False)
    say(f"{simulation.seconds:.1f} s, nothing was computed", style="dim", highlight=False)


def title(rank: RankResult) -> str:
    where = ", ".join(f"{axis} {place}" for axis, place in rank.place.items())
    blocks = ", ".join(f"stage {stage} of {count} blocks" for stage, count in rank.blocks.items())
    held = f", holding {rank.max_in_flight} micro-batches" if rank.live else ""
    return f"rank {rank.rank}" + (f" ({where})" if where else "") + (f": {blocks}{held}" if rank.live else "")


def traffic_table(rank: RankResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("axis", "collective"):
        table.add_column(column)
    for column in ("ranks", "calls", "message", "on the wire"):
        table.add_column(column, justify="right")
    for row in rank.traffic:
        counts = (f"{row.ranks:,}", f"{row.calls:,}")
        table.add_row(row.axis, row.collective, *counts, format_bytes(row.message_bytes), format_bytes(row.wire_bytes))
    whole = sum(row.wire_bytes for row in rank.traffic)
    table.add_row("all", "", "", f"{sum(row.calls for row in rank.traffic):,}", "", format_bytes(whole), style="bold")
    return table


def memory_table(rank: RankResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("held")
    for column in ("most", "at the peak"):
        table.add_column(column, justify="right")
    for kind, most in rank.peak.items():
        if most or rank.at_peak[kind]:
            table.add_row(kind, format_bytes(most), format_bytes(rank.at_peak[kind]))
    table.add_row("all", "", format_bytes(rank.peak_total), style="bold")
    return table
