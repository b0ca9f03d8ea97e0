"""Reads and writes a cluster as a TOML file; torch-free.

    like = "h100"                    # optional: start from a node of a known GPU; every other key overrides it
    name = "ours"
    nodes = 16
    devices_per_node = 8
    node_network_gbs = 400.0         # bandwidth of one node's adapters, shared by its devices;
                                     # or [inter_node] bandwidth_gbs, per device
    adapters_per_node = 4            # optional: one per device if it is not given

    [device]
    name = "h100"                    # a known GPU, or any name with memory_gb, memory_bandwidth_gbs and peak_tflops
    is_cpu = false                   # true if the host's CPU computes
    power_limit_watts = 500.0        # optional: a limit below the data sheet's, of a known GPU
    [device.peak_tflops]
    bf16 = 989.0

    [intra_node]                     # per device, in one direction
    bandwidth_gbs = 450.0
    latency_us = 3.0
    all_reduce_gbs = 480.0           # optional: an all-reduce that the switch reduces (NVLS)
    curve = [[1048576, 40.0], [16777216, 220.0]]   # measured: message bytes, bus bandwidth in GB/s

    [inter_node]
    curve = [[1048576, 9.0], [1073741824, 360.0]]  # the same of one group with all devices of several nodes, as
                                     # nccl-tests prints it; it is not per device: smaller groups of a node share it

A file that `meshwright plan measure` writes also has `launch_us`, `device.matmuls` and `intra_node.collectives`.
A gigabyte (GB) is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w

from meshwright.base.config.constraints import Range
from meshwright.base.config.reader import build_dataclass, read_toml
from meshwright.base.hardware.cluster import (
    GB,
    NODE_TYPES,
    TERA,
    BandwidthCurve,
    Cluster,
    Device,
    Link,
    MatmulRate,
    fill_peak_flops,
    preset_cluster,
    unstated_precisions,
)
from meshwright.errors import ConfigError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "fp4"]
PositiveRate = Annotated[float, Range(minimum=1e-9, maximum=1e9)]
Microseconds = Annotated[float, Range(minimum=0, maximum=1e7)]
DeviceCount = Annotated[int, Range(minimum=1, maximum=1 << 20)]
MatrixSize = Annotated[int, Range(minimum=1, maximum=1 << 24)]
Points = tuple[tuple[Annotated[float, Range(above=0, maximum=1e15)], ...], ...]

MAX_POINTS = 256
"""Limit on the points of one curve."""
MAX_DEVICES = 1 << 20
"""Limit on the devices of a cluster."""
MAX_ROWS = 256
"""Limit on the measured matmuls of a device, and on the measured collectives of a link."""
MICROSECONDS = 1e6
SIGNIFICANT_DIGITS = 15
"""Rounding to 15 digits removes the error of a unit conversion and nothing else."""
DEFAULT_LATENCY_US = {"intra_node": 3.0, "inter_node": 8.0}
"""Latency per hop of a link for which the file gives none."""


@dataclass(frozen=True)
class PeakSchema:
    """The table `device.peak_tflops`: dense TFLOP/s by precision."""

    fp64: PositiveRate | None = None
    fp32: PositiveRate | None = None
    bf16: PositiveRate | None = None
    fp16: PositiveRate | None = None
    fp8: PositiveRate | None = None
    fp4: PositiveRate | None = None


@dataclass(frozen=True)
class MatmulSchema:
    """One row of `device.matmuls`; see `MatmulRate`."""

    precision: Precision | None = None
    m: MatrixSize | None = None
    k: MatrixSize | None = None
    n: MatrixSize | None = None
    tflops: PositiveRate | None = None


@dataclass(frozen=True)
class DeviceSchema:
    """The table `device`."""

    name: str | None = None
    memory_gb: PositiveRate | None = None
    memory_bandwidth_gbs: PositiveRate | None = None
    is_cpu: bool = False
    power_limit_watts: PositiveRate | None = None
    peak_tflops: PeakSchema | None = None
    matmuls: tuple[MatmulSchema, ...] = ()


@dataclass(frozen=True)
class CurveSchema:
    """One row of `intra_node.collectives` or `inter_node.collectives`; see `BandwidthCurve`."""

    collective: Collective | None = None
    ranks: DeviceCount | None = None
    points: Points = ()


@dataclass(frozen=True)
class LinkSchema:
    """The table `intra_node` or `inter_node`."""

    bandwidth_gbs: PositiveRate | None = None
    latency_us: Microseconds | None = None
    curve: Points = ()
    collectives: tuple[CurveSchema, ...] = ()
    all_reduce_gbs: PositiveRate | None = None
    """bus bandwidth of an all-reduce that the switch reduces (NVLS)"""


@dataclass(frozen=True)
class ClusterSchema:
    """The keys of a cluster file, each with its type and range."""

    name: str | None = None
    like: str | None = None
    nodes: DeviceCount | None = None
    devices_per_node: DeviceCount | None = None
    node_network_gbs: PositiveRate | None = None
    adapters_per_node: DeviceCount | None = None
    """network adapters of a node; default: one per device"""
    launch_us: Microseconds | None = None
    """measured time in which the host launches one operator"""
    device: DeviceSchema = DeviceSchema()
    intra_node: LinkSchema | None = None
    inter_node: LinkSchema | None = None


def read_cluster(path: Path) -> Cluster:
    """Reads and validates a cluster file; the file is untrusted."""
    tree = read_toml(path, "cluster file")
    try:
        return cluster_from_table(tree, path.stem)
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error.message}", error.hint) from None


def cluster_from_table(table: dict[str, Any], name: str) -> Cluster:
    """Builds and validates the cluster of the tables of a cluster file, which are untrusted."""
    schema: ClusterSchema = build_dataclass(ClusterSchema, table, "")
    return build_cluster(schema, name)


def build_cluster(schema: ClusterSchema, name: str) -> Cluster:
    """Builds the cluster that a file describes; `name` is used if the file gives none."""
    if schema.like is not None and schema.like not in NODE_TYPES:
        raise ConfigError(f"like = {dumps(schema.like)} is unknown", f"expected one of {', '.join(NODE_TYPES)}")
    base = preset_cluster(schema.like) if schema.like else None
    devices = require(
        schema.devices_per_node or (base and base.devices_per_node), "devices_per_node", "devices_per_node = 8"
    )
    nodes = schema.nodes or 1
    device = build_device(schema.device, base.device if base else None)
    unused_link = Link(device.memory_bandwidth, 0.0) if devices == 1 else None  # one device has no intra-node peer
    intra_node = build_link(schema.intra_node or LinkSchema(), "intra_node", base.intra_node if base else unused_link)
    inter_schema = schema.inter_node or LinkSchema()
    if schema.node_network_gbs is not None:
        if inter_schema.bandwidth_gbs is not None:
            raise ConfigError(
                "node_network_gbs and inter_node.bandwidth_gbs both give the bandwidth", "expected only one of them"
            )
        inter_schema = replace(inter_schema, bandwidth_gbs=schema.node_network_gbs / devices)
    if nodes * devices > MAX_DEVICES:
        raise ConfigError(
            f"the cluster has {nodes:,} nodes of {devices:,} devices", f"expected at most {MAX_DEVICES:,} devices"
        )
    inter_base = base.inter_node if base else (intra_node if nodes == 1 else None)
    return Cluster(
        schema.name or schema.like or name,
        device,
        devices,
        nodes,
        intra_node,
        build_link(inter_schema, "inter_node", inter_base, sharing=devices),
        convert_unit(schema.launch_us or 0.0, 1 / MICROSECONDS),
        schema.adapters_per_node or 0,
    )


def build_device(schema: DeviceSchema, base: Device | None) -> Device:
    """Builds the device of a cluster file; `base` is the known device whose values the file overrides."""
    if schema.name in NODE_TYPES:
        base = NODE_TYPES[schema.name].device
    hint = f"device.name = one of {', '.join(NODE_TYPES)}, or memory_gb, memory_bandwidth_gbs and peak_tflops"
    rates = asdict(schema.peak_tflops) if schema.peak_tflops else {}
    given_peaks = {precision: convert_unit(rate, TERA) for precision, rate in rates.items() if rate is not None}
    memory = schema.memory_gb and convert_unit(schema.memory_gb, GB)
    bandwidth = schema.memory_bandwidth_gbs and convert_unit(schema.memory_bandwidth_gbs, GB)
    peaks = (base.peak_flops if base else {}) | given_peaks
    matmuls = tuple(
        build_matmul_rate(row, f"device.matmuls[{i}]")
        for i, row in enumerate(limit_rows(schema.matmuls, "device.matmuls"))
    )
    device = Device(
        schema.name or (base.name if base else "device"),
        require(memory or (base and base.memory), "device.memory_gb", hint),
        require(bandwidth or (base and base.memory_bandwidth), "device.memory_bandwidth_gbs", hint),
        fill_peak_flops(require(peaks or None, "device.peak_tflops", hint)),
        is_cpu=schema.is_cpu,
        measured_matmuls=matmuls,
        assumed_peaks=unstated_precisions(set(peaks).difference(base.assumed_peaks if base else ()) | set(given_peaks)),
    )
    if schema.power_limit_watts is not None and (base is None or not base.power or matmuls):
        raise ConfigError(
            "device.power_limit_watts is given for a device whose power is not known, or that was measured",
            f"expected it with like or device.name = one of {', '.join(NODE_TYPES)}",
        )
    if base is None:
        return device
    device = replace(
        device,
        multiprocessors=base.multiprocessors,
        sustained_fraction=base.sustained_fraction,
        post_ampere=base.post_ampere,
        host=base.host,
        host_bandwidth=base.host_bandwidth,
        power=base.power,
        measured_on=base.measured_on,
    )
    return device.with_power_limit(schema.power_limit_watts) if schema.power_limit_watts is not None else device


def build_matmul_rate(schema: MatmulSchema, where: str) -> MatmulRate:
    row = {key: require(value, f"{where}.{key}", f"a value for {key}") for key, value in vars(schema).items()}
    return MatmulRate(row["precision"], row["m"], row["k"], row["n"], convert_unit(row["tflops"], TERA))


def build_link(schema: LinkSchema, where: str, base: Link | None, sharing: int = 1) -> Link:
    """Builds a link; `base` is the link whose values the file overrides, `sharing` the devices that share its curve.

    If the file gives a curve and no bandwidth, the bandwidth is a device's share of the best of the curve.
    """
    curve = parse_points(schema.curve, f"{where}.curve") or (base.bandwidth_curve if base else ())
    curves = tuple(
        build_curve(row, f"{where}.collectives[{i}]")
        for i, row in enumerate(limit_rows(schema.collectives, f"{where}.collectives"))
    )
    best = max((rate / sharing for _, rate in curve), default=None)
    given = convert_unit(schema.bandwidth_gbs, GB) if schema.bandwidth_gbs is not None else None
    default_latency = base.latency if base else DEFAULT_LATENCY_US[where] / MICROSECONDS
    hint = f"{where}.bandwidth_gbs, per device in one direction"
    hint += ", or node_network_gbs" if where == "inter_node" else ""
    all_reduce = base.all_reduce_bandwidth if base and given is None else 0.0  # that of another link does not apply
    return Link(
        require(given or (base and base.bandwidth) or best, f"{where}.bandwidth_gbs", hint),
        default_latency if schema.latency_us is None else convert_unit(schema.latency_us, 1 / MICROSECONDS),
        curve,
        curves or (base.collective_curves if base else ()),
        all_reduce if schema.all_reduce_gbs is None else convert_unit(schema.all_reduce_gbs, GB),
    )


def build_curve(schema: CurveSchema, where: str) -> BandwidthCurve:
    points = parse_points(schema.points, f"{where}.points")
    return BandwidthCurve(
        require(schema.collective, f"{where}.collective", "all_reduce, all_gather, ..."),
        require(schema.ranks, f"{where}.ranks", "a number of ranks"),
        require(points or None, f"{where}.points", "pairs of message bytes and GB/s"),
    )


def parse_points(points: Points, where: str) -> tuple[tuple[float, float], ...]:
    """Validates the points of a curve and converts GB/s to bytes/s."""
    if len(points) > MAX_POINTS or any(len(point) != 2 for point in points):
        raise ConfigError(f"{where} is not a curve", f"expected at most {MAX_POINTS} pairs of message bytes and GB/s")
    if any(smaller[0] >= larger[0] for smaller, larger in pairwise(points)):
        raise ConfigError(
            f"{where} is not in ascending order", "expected pairs of message bytes and GB/s, ascending in bytes"
        )
    return tuple((size, convert_unit(rate, GB)) for size, rate in points)


def limit_rows(rows: Sequence[Any], where: str) -> Sequence[Any]:
    if len(rows) > MAX_ROWS:
        raise ConfigError(f"{where} has {len(rows):,} rows", f"expected at most {MAX_ROWS}")
    return rows


def require(value: Any, where: str, hint: str) -> Any:
    if value is None:
        raise ConfigError(f"{where} is missing", f"expected {hint}")
    return value


def cluster_toml(cluster: Cluster, remarks: Sequence[str] = ()) -> str:
    """Returns the text of a cluster file without defaults; `read_cluster` is its inverse."""
    comments = "".join(f"# {line}\n" for remark in remarks for line in remark.splitlines())
    return comments + tomli_w.dumps(cluster_table(cluster))


def cluster_table(cluster: Cluster) -> dict[str, Any]:
    """Returns the tables of a cluster file."""
    device = cluster.device
    table: dict[str, Any] = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
    }
    if cluster.adapters_per_node:
        table["adapters_per_node"] = cluster.adapters_per_node
    if cluster.launch_seconds:
        table["launch_us"] = convert_unit(cluster.launch_seconds, MICROSECONDS)
    table["device"] = {
        "name": device.name,
        "memory_gb": convert_unit(device.memory, 1 / GB),
        "memory_bandwidth_gbs": convert_unit(device.memory_bandwidth, 1 / GB),
        **({"is_cpu": True} if device.is_cpu else {}),
        **({"power_limit_watts": device.power} if is_power_limited(device) else {}),
        "peak_tflops": {
            precision: convert_unit(rate, 1 / TERA)
            for precision, rate in device.peak_flops.items()
            if precision not in device.assumed_peaks
        },
        **({"matmuls": [matmul_table(row) for row in device.measured_matmuls]} if device.measured_matmuls else {}),
    }
    table["intra_node"] = link_table(cluster.intra_node)
    if cluster.nodes > 1 or cluster.inter_node != cluster.intra_node:
        table["inter_node"] = link_table(cluster.inter_node)
    return table


def is_power_limited(device: Device) -> bool:
    """Whether a known device has a lower power limit than its data sheet states."""
    return device.name in NODE_TYPES and device.power < NODE_TYPES[device.name].device.power


def matmul_table(row: MatmulRate) -> dict[str, Any]:
    tflops = convert_unit(row.flops_per_second, 1 / TERA)
    return {"precision": row.precision, "m": row.m, "k": row.k, "n": row.n, "tflops": tflops}


def link_table(link: Link) -> dict[str, Any]:
    table: dict[str, Any] = {
        "bandwidth_gbs": convert_unit(link.bandwidth, 1 / GB),
        "latency_us": convert_unit(link.latency, MICROSECONDS),
    }
    if link.all_reduce_bandwidth:
        table["all_reduce_gbs"] = convert_unit(link.all_reduce_bandwidth, 1 / GB)
    if link.bandwidth_curve:
        table["curve"] = points_table(link.bandwidth_curve)
    if link.collective_curves:
        table["collectives"] = [
            {"collective": curve.collective, "ranks": curve.ranks, "points": points_table(curve.points)}
            for curve in link.collective_curves
        ]
    return table


def points_table(points: tuple[tuple[float, float], ...]) -> list[list[float]]:
    return [[size, convert_unit(rate, 1 / GB)] for size, rate in points]


def convert_unit(value: float, factor: float) -> float:
    """Multiplies by a unit's factor and rounds to SIGNIFICANT_DIGITS."""
    return float(f"{value * factor:.{SIGNIFICANT_DIGITS}g}")
