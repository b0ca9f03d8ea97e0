"""A simulation as terminal tables: communication volume and memory of every simulated rank. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from meshwright.base.io import format_bytes
from meshwright.base.terminal.console import make_console
from meshwright.planner.display.schedule_text import ends_of

if TYPE_CHECKING:
    from meshwright.prover.simulator.result import RankResult, Simulation


def show(simulation: Simulation) -> None:
    console = make_console()
    if not console.is_terminal:
        console = make_console(width=140)
    out = console.print
    out(f"{simulation.layout} = {simulation.ranks:,} ranks; {simulation.parameters:,} parameters", highlight=False)
    out(simulation.batch, highlight=False)
    if simulation.schedule:
        in_flight = " ".join(map(str, ends_of(simulation.in_flight)))
        out(f"{simulation.schedule} pipeline; peak micro-batches in flight by rank: {in_flight}", highlight=False)
    for result in simulation.results:
        out()
        out(title(result), style="bold", highlight=False)
        out(communication_table(result))
        out(memory_table(result))
        for line in result.extrapolated:
            out(line, style="dim", highlight=False)
    out()
    for note in simulation.notes:
        out(note, style="dim", highlight=False)
    out(f"simulated in {simulation.seconds:.1f} s without computing any values", style="dim", highlight=False)


def title(result: RankResult) -> str:
    coordinates = ", ".join(f"{axis} {index}" for axis, index in result.coordinates.items())
    name = f"rank {result.rank}" + (f" ({coordinates})" if coordinates else "")
    if not result.in_flight:
        return name
    stages = ", ".join(f"stage {stage} with {count} blocks" for stage, count in result.blocks.items())
    return f"{name}: {stages}, peak micro-batches in flight {result.max_in_flight}"


def communication_table(result: RankResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("axis", "collective"):
        table.add_column(column)
    for column in ("ranks", "calls", "message bytes", "wire bytes"):
        table.add_column(column, justify="right")
    for row in result.communication:
        counts = (f"{row.ranks:,}", f"{row.calls:,}")
        table.add_row(row.axis, row.collective, *counts, format_bytes(row.message_bytes), format_bytes(row.wire_bytes))
    calls, wire = (sum(getattr(row, name) for row in result.communication) for name in ("calls", "wire_bytes"))
    table.add_row("total", "", "", f"{calls:,}", "", format_bytes(wire), style="bold")
    return table


def memory_table(result: RankResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("memory class")
    for column in ("own peak", "at total peak"):
        table.add_column(column, justify="right")
    for kind, peak in result.peak.items():
        if peak or result.at_peak[kind]:
            table.add_row(kind, format_bytes(peak), format_bytes(result.at_peak[kind]))
    table.add_row("total", "", format_bytes(result.peak_total), style="bold")
    return table
