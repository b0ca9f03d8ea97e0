"""Shows a measured machine on the terminal: matmuls, memory, operator launches and collectives; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.base.hardware.cluster import Cluster
from meshwright.base.hardware.resolve_cluster import machine_file
from meshwright.base.io import format_si, printable
from meshwright.base.terminal.console import make_console


def show_machine(cluster: Cluster, remarks: Sequence[str], file: Path, console: Console | None = None) -> None:
    """Prints the measurement that was written to `file`; it is readable on a terminal of 80 columns."""
    console = console or make_console()
    device = cluster.device
    title = f"{cluster.devices_per_node} x {printable(device.name)}, {format_si(device.memory)}B of memory each"
    console.print(title, style="bold", markup=False)
    console.print(f"memory bandwidth  {format_si(device.memory_bandwidth)}B/s (read and write)")
    if cluster.launch_seconds:
        console.print(f"operator launch   {cluster.launch_seconds * 1e6:.3g} us")
    if device.measured_matmuls:
        console.print(matmul_table(cluster))
    if cluster.intra_node.collective_curves:
        console.print(collective_table(cluster))
    for remark in remarks:
        console.print(remark, style="dim", markup=False, soft_wrap=True)
    name = "here" if file == machine_file() else file
    console.print(f"written to {file}; plan for this machine with --cluster {name}", markup=False, soft_wrap=True)


def matmul_table(cluster: Cluster) -> Table:
    """Builds a table with one row per shape and one column per precision."""
    measured = cluster.device.measured_matmuls
    rates = {(row.m, row.k, row.n, row.precision): row.flops_per_second for row in measured}
    precisions = list(dict.fromkeys(row.precision for row in measured))
    table = Table("matmul (m x k x n)", title="FLOP/s per device", title_justify="left", title_style="", box=box.SIMPLE)
    for precision in precisions:
        table.add_column(precision, justify="right")
    for shape in dict.fromkeys(key[:3] for key in rates):
        cells = (rates.get((*shape, precision)) for precision in precisions)
        table.add_row(" x ".join(map(str, shape)), *(format_si(rate) if rate else "-" for rate in cells))
    return table


def collective_table(cluster: Cluster) -> Table:
    """Builds a table with one row per number of ranks and message size, and one column per collective."""
    curves = cluster.intra_node.collective_curves
    collectives = list(dict.fromkeys(curve.collective for curve in curves))
    table = Table(
        title="bus bandwidth in bytes/s (nccl-tests' definition)",
        title_justify="left",
        title_style="",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for heading in ("ranks", "message", *collectives):
        table.add_column(heading, justify="right")
    for ranks in dict.fromkeys(curve.ranks for curve in curves):
        rates = {curve.collective: dict(curve.points) for curve in curves if curve.ranks == ranks}
        for size in sorted({size for points in rates.values() for size in points}):
            cells = (rates.get(collective, {}).get(size) for collective in collectives)
            row = (format_si(rate) if rate else "-" for rate in cells)
            table.add_row(str(ranks), f"{format_si(size)}B", *row)
        table.add_section()
    return table
