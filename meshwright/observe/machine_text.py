"""A machine as measured, on the terminal: products by shape, memory, operators and collectives. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.io import format_si
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.hardware.resolve_cluster import machine_file


def show(cluster: Cluster, remarks: Sequence[str], file: Path, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    device = cluster.device
    console.print(
        f"{cluster.devices_per_node} x {device.name}, {format_si(device.memory)}B each", style="bold", markup=False
    )
    console.print(f"memory     {format_si(device.memory_bandwidth)}B/s read and written")
    if "launch" in cluster.measured:
        console.print(f"operators  {cluster.measured['launch'] * 1e6:.3g} us each")
    if device.measured_matmuls:
        console.print(products(cluster))
    if cluster.intra_node.collective_curves:
        console.print(collectives(cluster))
    for remark in remarks:
        console.print(remark, style="dim", markup=False, soft_wrap=True)
    word = "here" if file == machine_file() else file
    console.print(f"written to {file}: plans take it with --cluster {word}", markup=False, soft_wrap=True)


def products(cluster: Cluster) -> Table:
    rates = {(row.m, row.k, row.n, row.precision): row.flops_per_second for row in cluster.device.measured_matmuls}
    precisions = list(dict.fromkeys(row.precision for row in cluster.device.measured_matmuls))
    table = Table("product", title="FLOP/s of one device", title_justify="left", title_style="")
    for precision in precisions:
        table.add_column(precision, justify="right")
    for shape in dict.fromkeys(key[:3] for key in rates):
        cells = (rates.get((*shape, precision)) for precision in precisions)
        table.add_row(" x ".join(map(str, shape)), *(format_si(rate) if rate else "-" for rate in cells))
    return table


def collectives(cluster: Cluster) -> Table:
    curves = cluster.intra_node.collective_curves
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    table = Table("collective", "ranks", title="bytes/s on the bus", title_justify="left", title_style="")
    for size in sizes:
        table.add_column(f"{format_si(size)}B", justify="right")
    for curve in curves:
        rates = dict(curve.points)
        cells = (format_si(rates[size]) if size in rates else "-" for size in sizes)
        table.add_row(curve.collective, str(curve.ranks), *cells)
    return table
