"""A cluster as a TOML file: read with every field checked, and written; torch-free.

    name = "ours"            # all of it is optional beside like = "h100", which it then overrides
    nodes = 16
    devices = 8              # a node
    adapters_gbs = 400.0     # of a node, one direction, shared by its devices; or [between] gbs of one device

    [device]
    name = "h100"            # a known one; or any name with memory_gb, stream_gbs and peak_tflops
    host = false             # true where the processors compute, not a device beside them
    [device.peak_tflops]
    bf16 = 989.0

    [inside]                 # one direction of one device
    gbs = 450.0
    latency_us = 3.0
    curve = [[1048576, 40.0], [16777216, 220.0]]   # measured: bytes of a message, GB/s on the bus

A gigabyte is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.config.constraints import Range
from meshwright.config.reader import build_dataclass, read_toml
from meshwright.errors import ConfigError
from meshwright.planner.hardware.cluster import (
    DEVICES,
    GB,
    TERA,
    BandwidthCurve,
    Cluster,
    Device,
    Link,
    MatmulRate,
    preset_cluster,
)

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "fp4"]
Figure = Annotated[float, Range(minimum=1e-9, maximum=1e9)]
Short = Annotated[float, Range(minimum=0, maximum=1e7)]
Count = Annotated[int, Range(minimum=1, maximum=1 << 20)]
Size = Annotated[int, Range(minimum=1, maximum=1 << 24)]
Points = tuple[tuple[Annotated[float, Range(above=0, maximum=1e15)], ...], ...]

MOST_POINTS = 256
MAX_DEVICES = 1 << 20
MOST_ROWS = 256
MICROS = 1e6
DIGITS = 15
"""What a unit's factor does to the last bits is rounded away, and nothing else."""
USUAL_LATENCY = {"inside": 3.0, "between": 8.0}
"""Microseconds a hop where the file gives none."""


@dataclass(frozen=True)
class PeakForm:
    fp64: Figure | None = None
    fp32: Figure | None = None
    bf16: Figure | None = None
    fp16: Figure | None = None
    fp8: Figure | None = None
    fp4: Figure | None = None


@dataclass(frozen=True)
class ProductForm:
    precision: Precision | None = None
    rows: Size | None = None
    inner: Size | None = None
    columns: Size | None = None
    tflops: Figure | None = None


@dataclass(frozen=True)
class DeviceForm:
    name: str | None = None
    memory_gb: Figure | None = None
    stream_gbs: Figure | None = None
    host: bool = False
    peak_tflops: PeakForm | None = None
    products: tuple[ProductForm, ...] = ()


@dataclass(frozen=True)
class CurveForm:
    collective: Collective | None = None
    ranks: Count | None = None
    points: Points = ()


@dataclass(frozen=True)
class LinkForm:
    gbs: Figure | None = None
    latency_us: Short | None = None
    curve: Points = ()
    curves: tuple[CurveForm, ...] = ()


@dataclass(frozen=True)
class MeasuredForm:
    launch_us: Short | None = None
    """one operator of a step, from its call to the next, when it has nothing to compute"""


@dataclass(frozen=True)
class ClusterSchema:
    name: str | None = None
    like: str | None = None
    nodes: Count | None = None
    devices: Count | None = None
    adapters_gbs: Figure | None = None
    device: DeviceForm = DeviceForm()
    inside: LinkForm | None = None
    between: LinkForm | None = None
    measured: MeasuredForm = MeasuredForm()


def read_cluster(path: Path) -> Cluster:
    tree = read_toml(path, "cluster file")
    try:
        form: ClusterSchema = build_dataclass(ClusterSchema, tree, "")
        return build_cluster(form, path.stem)
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error.what}", error.next_move) from None


def build_cluster(form: ClusterSchema, name: str) -> Cluster:
    if form.like is not None and form.like not in DEVICES:
        raise ConfigError(f"like = {dumps(form.like)} is not known", f"allowed: {', '.join(DEVICES)}")
    base = preset_cluster(form.like) if form.like else None
    per_node = needed(form.devices or (base and base.devices_per_node), "devices", "devices = 8, of a node")
    nodes = form.nodes or 1
    device = device_of(form.device, base.device if base else None)
    alone = Link(device.memory_bandwidth, 0.0) if per_node == 1 else None  # no peer in its node: never asked
    inside = link_of(form.inside or LinkForm(), "inside", base.intra_node if base else alone)
    between = form.between or LinkForm()
    if form.adapters_gbs is not None:
        if between.gbs is not None:
            raise ConfigError("adapters_gbs and between.gbs say the same", "allowed: one of them")
        between = replace(between, gbs=form.adapters_gbs / per_node)
    if nodes * per_node > MAX_DEVICES:
        raise ConfigError(f"{nodes:,} nodes of {per_node:,} devices", f"allowed: {MAX_DEVICES:,} devices in all")
    known = base.inter_node if base else (inside if nodes == 1 else None)
    measured = {} if form.measured.launch_us is None else {"launch": scaled(form.measured.launch_us, 1 / MICROS)}
    return Cluster(
        form.name or form.like or name, device, per_node, nodes, inside, link_of(between, "between", known), measured
    )


def device_of(form: DeviceForm, base: Device | None) -> Device:
    base = DEVICES.get(form.name or "", base)
    hint = f"device.name = one of {', '.join(DEVICES)}, or memory_gb, stream_gbs and peak_tflops"
    rates = {row.name: getattr(form.peak_tflops, row.name) for row in fields(PeakForm)} if form.peak_tflops else {}
    peak = {precision: scaled(rate, TERA) for precision, rate in rates.items() if rate is not None}
    memory = form.memory_gb and scaled(form.memory_gb, GB)
    stream = form.stream_gbs and scaled(form.stream_gbs, GB)
    whole = (base.peak_flops if base else {}) | peak
    rows = tuple(
        product_of(row, f"device.products[{i}]") for i, row in enumerate(few(form.products, "device.products"))
    )
    device = Device(
        form.name or (base.name if base else "device"),
        needed(memory or (base and base.memory), "device.memory_gb", hint),
        needed(stream or (base and base.memory_bandwidth), "device.stream_gbs", hint),
        fill_peak_flops(needed(whole or None, "device.peak_tflops", hint)),
        is_cpu=form.host,
        measured_matmuls=rows,
    )
    if base is None:
        return device
    return replace(
        device,
        multiprocessors=base.multiprocessors,
        sustained_fraction=base.sustained_fraction,
        post_ampere=base.post_ampere,
    )


def fill_peak_flops(peak: dict[str, float]) -> dict[str, float]:
    """Every precision has a rate: one that is not given, that of the one it would be computed in."""
    if "bf16" not in peak and "fp32" not in peak:
        raise ConfigError("device.peak_tflops has neither bf16 nor fp32", "allowed: at least one of them")
    whole = dict(peak)
    whole.setdefault("bf16", peak.get("fp32", 0.0))
    whole.setdefault("fp32", whole["bf16"] / 2)
    whole.setdefault("fp64", whole["fp32"] / 2)
    whole.setdefault("fp16", whole["bf16"])
    whole.setdefault("fp8", whole["bf16"])
    whole.setdefault("fp4", whole["fp8"])
    return whole


def product_of(form: ProductForm, where: str) -> MatmulRate:
    row = {key: needed(value, f"{where}.{key}", f"a {key}") for key, value in vars(form).items()}
    return MatmulRate(row["precision"], row["rows"], row["inner"], row["columns"], scaled(row["tflops"], TERA))


def link_of(form: LinkForm, where: str, base: Link | None) -> Link:
    """`base` is what the file overrides; a curve alone gives a bandwidth, too: its best."""
    curve = points_of(form.curve, f"{where}.curve") or (base.bandwidth_curve if base else ())
    curves = tuple(
        BandwidthCurve(
            needed(row.collective, f"{where}.curves[{i}].collective", "all_reduce, all_gather, ..."),
            needed(row.ranks, f"{where}.curves[{i}].ranks", "a number of ranks"),
            needed(
                points_of(row.points, f"{where}.curves[{i}].points") or None, f"{where}.curves[{i}].points", "points"
            ),
        )
        for i, row in enumerate(few(form.curves, f"{where}.curves"))
    )
    best = max((rate for _, rate in curve), default=None)
    given = scaled(form.gbs, GB) if form.gbs is not None else None
    usual = base.latency if base else USUAL_LATENCY[where] / MICROS
    hint = f"{where}.gbs, one direction of one device" + (", or adapters_gbs" if where == "between" else "")
    return Link(
        needed(given or (base and base.bandwidth) or best, f"{where}.gbs", hint),
        usual if form.latency_us is None else scaled(form.latency_us, 1 / MICROS),
        curve,
        curves or (base.collective_curves if base else ()),
    )


def points_of(points: Points, where: str) -> tuple[tuple[float, float], ...]:
    if len(points) > MOST_POINTS or any(len(point) != 2 for point in points):
        raise ConfigError(f"{where} is no curve", f"allowed: at most {MOST_POINTS} pairs of bytes and GB/s")
    if any(one[0] >= other[0] for one, other in pairwise(points)):
        raise ConfigError(f"{where} is not in order", "allowed: pairs of bytes and GB/s, with growing bytes")
    return tuple((size, scaled(rate, GB)) for size, rate in points)


def few(rows: Sequence[Any], where: str) -> Sequence[Any]:
    if len(rows) > MOST_ROWS:
        raise ConfigError(f"{where} has {len(rows):,} rows", f"allowed: at most {MOST_ROWS}")
    return rows


def needed(value: Any, where: str, hint: str) -> Any:
    if value is None:
        raise ConfigError(f"{where} is missing", f"allowed: {hint}")
    return value


def cluster_toml(cluster: Cluster, remarks: Sequence[str] = ()) -> str:
    """The whole cluster as a file, likeness resolved; `read_cluster` is its inverse."""
    device = cluster.device
    lines = [f"# {remark}" for remark in remarks]
    lines += [f"name = {dumps(cluster.name)}", f"nodes = {cluster.nodes}", f"devices = {cluster.devices_per_node}", ""]
    lines += ["[device]", f"name = {dumps(device.name)}"]
    lines += [f"memory_gb = {number(device.memory / GB)}", f"stream_gbs = {number(device.memory_bandwidth / GB)}"]
    lines += ["host = true"] if device.is_cpu else []
    lines += rows_toml(
        "products",
        [
            f'precision = "{row.precision}", rows = {row.m}, inner = {row.k}, columns = {row.n}, '
            f"tflops = {number(row.flops_per_second / TERA)}"
            for row in device.measured_matmuls
        ],
    )
    lines += ["", "[device.peak_tflops]"]
    lines += [f"{precision} = {number(rate / TERA)}" for precision, rate in device.peak_flops.items()]
    links = {"inside": cluster.intra_node, "between": cluster.inter_node}
    if cluster.nodes == 1 and cluster.inter_node == cluster.intra_node:
        del links["between"]
    for where, link in links.items():
        lines += ["", f"[{where}]", f"gbs = {number(link.bandwidth / GB)}"]
        lines += [f"latency_us = {number(link.latency * MICROS)}"]
        lines += [f"curve = {points_toml(link.bandwidth_curve)}"] if link.bandwidth_curve else []
        rows = [
            f'collective = "{curve.collective}", ranks = {curve.ranks}, points = {points_toml(curve.points)}'
            for curve in link.collective_curves
        ]
        lines += rows_toml("curves", rows)
    if "launch" in cluster.measured:
        lines += ["", "[measured]", f"launch_us = {number(cluster.measured['launch'] * MICROS)}"]
    return "\n".join(lines) + "\n"


def rows_toml(key: str, rows: list[str]) -> list[str]:
    """A list of tables, one a line."""
    return [f"{key} = [", *(f"    {{{row}}}," for row in rows), "]"] if rows else []


def scaled(value: float, unit: float) -> float:
    return float(f"{value * unit:.{DIGITS}g}")


def number(value: float) -> str:
    text = f"{value:.{DIGITS}g}"
    return text if "." in text or "e" in text else f"{text}.0"


def points_toml(points: tuple[tuple[float, float], ...]) -> str:
    return "[" + ", ".join(f"[{number(size)}, {number(rate / GB)}]" for size, rate in points) + "]"
