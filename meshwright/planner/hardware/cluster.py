"""The machines: devices, what they compute, hold and move, and the links inside and between nodes; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MatmulRate:
    """A product of matrices as it was measured: rows x inner by inner x columns."""

    precision: str
    m: int
    k: int
    n: int
    flops_per_second: float
    """FLOP a second"""


@dataclass(frozen=True)
class BandwidthCurve:
    """A collective as it was measured."""

    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send"""
    ranks: int
    points: tuple[tuple[float, float], ...]
    """(bytes of a whole message, bytes a second on the bus, counted as nccl-tests counts them)"""


@dataclass(frozen=True)
class Device:
    name: str
    memory: float
    """bytes"""
    memory_bandwidth: float
    """bytes a second that kernels read and write"""
    peak_flops: dict[str, float]
    """FLOP a second by precision, dense, as the maker prints it; of a measured machine the best that was seen"""
    multiprocessors: int = 0
    """multiprocessors, over which a product's tiles are dealt out; 0: unknown, and no tiles are counted"""
    sustained_fraction: dict[str, float] = field(default_factory=lambda: {"bf16": 0.65})
    """share of the peak that large products reach for as long as a run lasts: fitted, see docs/planner.md"""
    post_ampere: bool = False
    """whether products have other instructions than an A100's, for which kernels had to be written anew"""
    memory_efficiency: float = 0.85
    """share of `stream` that kernels reach"""
    is_cpu: bool = False
    """whether it is the host itself that computes"""
    measured_matmuls: tuple[MatmulRate, ...] = ()
    """where somebody measured: then these are what products reach, and `stream` is what kernels do"""


@dataclass(frozen=True)
class Link:
    """What one device sends, in one direction, to its peers."""

    bandwidth: float
    """bytes a second a device, as the maker prints it"""
    latency: float
    """seconds that one hop of a collective takes"""
    bandwidth_curve: tuple[tuple[float, float], ...] = ()
    """measured (bytes of a message, bytes a second on the bus), where somebody measured; else latency and bandwidth"""
    collective_curves: tuple[BandwidthCurve, ...] = ()
    """the same by collective and number of ranks"""


@dataclass(frozen=True)
class Cluster:
    name: str
    device: Device
    devices_per_node: int
    nodes: int
    intra_node: Link
    inter_node: Link
    """a device's share: of a node's adapters, divided by its devices"""
    measured: dict[str, float] = field(default_factory=dict)
    """figures of this machine that take the place of fitted ones, by the name of what they replace"""

    @property
    def device_count(self) -> int:
        return self.devices_per_node * self.nodes

    def with_devices(self, devices: int) -> Cluster:
        """So many of the same devices: whole nodes, or a part of one."""
        per_node = min(self.devices_per_node, devices)
        return replace(self, devices_per_node=per_node, nodes=-(-devices // per_node))


GB, TERA = 1e9, 1e12
MIB = float(1 << 20)


def peaks(
    bf16: float,
    fp8: float | None = None,
    fp4: float | None = None,
    fp32: float | None = None,
    fp64: float | None = None,
) -> dict[str, float]:
    """In TFLOP/s. Our trainer leaves TF32 off, so fp32 is what the plain units do."""
    rates = {"bf16": bf16, "fp16": bf16, "fp32": fp32 or bf16 / 2, "fp8": fp8 or bf16, "fp4": fp4 or fp8 or bf16}
    rates["fp64"] = fp64 or rates["fp32"] / 2
    return {precision: rate * TERA for precision, rate in rates.items()}


def sustained(bf16: float, fp8: float, fp4: float = 0) -> dict[str, float]:
    return {"bf16": bf16, "fp8": fp8, "fp4": fp4 or fp8}


A100, H100 = peaks(312, fp32=19.5, fp64=19.5), peaks(989, 1979, fp32=67, fp64=67)

# Rates without sparsity and memory bandwidth: the makers' data sheets of the SXM and OAM boards (A100, H100, H200,
# HGX B200 and B300, GB200 and GB300 NVL72 divided by 72, MI300X). Memory: what nvidia-smi and rocm-smi show of it, in
# MiB; the printed 141 GB of an H200 are GiB, and of the printed 192 GB of a B200 180 are there. An H100 with slower
# memory that is held to 500 W is one that published runs used.
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40", 40960 * MIB, 1555 * GB, A100, 108, {"bf16": 0.8}),
        Device("a100-80", 81920 * MIB, 2039 * GB, A100, 108, {"bf16": 0.8}),
        Device("h100", 81559 * MIB, 3350 * GB, H100, 132, sustained(0.66, 0.56), True),
        Device("h100-500w", 97871 * MIB, 2400 * GB, H100, 132, sustained(0.52, 0.56), True),
        Device("h200", 143771 * MIB, 4800 * GB, H100, 132, sustained(0.69, 0.66), True),
        Device(
            "b200", 183359 * MIB, 7700 * GB, peaks(2250, 4500, 9000, 75, 37), 148, sustained(0.68, 0.57, 0.46), True
        ),
        Device(
            "b300", 275040 * MIB, 7750 * GB, peaks(2250, 4500, 13500, 77, 1.2), 148, sustained(0.7, 0.62, 0.46), True
        ),
        Device(
            "gb200", 189471 * MIB, 8000 * GB, peaks(2500, 5000, 10000, 80, 40), 148, sustained(0.67, 0.52, 0.45), True
        ),
        Device(
            "gb300",
            284208 * MIB,
            8000 * GB,
            peaks(2500, 5000, 15000, 80, 1.3),
            148,
            sustained(0.69, 0.71, 0.45),
            True,
        ),
        Device(
            "mi300x", 196592 * MIB, 5300 * GB, peaks(1307, 2615, fp32=163, fp64=163), 304, sustained(0.5, 0.45), True
        ),
    )
}

# Inside, one direction: NVLink 3, 4 and 5 (600, 900 and 1,800 GB/s both ways), seven links of 64 GB/s of an MI300X.
# Between: an adapter a device of the makers' own systems: 200 Gb/s (DGX A100), 400 (H100, H200, B200, GB200, MI300X)
# or 800 (B300, GB300). Latency a hop is of the order that nccl-tests shows for small messages.
NODES: dict[str, tuple[int, Link, Link]] = {
    "a100-40": (8, Link(300 * GB, 5e-6), Link(25 * GB, 8e-6)),
    "a100-80": (8, Link(300 * GB, 5e-6), Link(25 * GB, 8e-6)),
    "h100": (8, Link(450 * GB, 3e-6), Link(50 * GB, 8e-6)),
    "h100-500w": (8, Link(450 * GB, 3e-6), Link(50 * GB, 8e-6)),
    "h200": (8, Link(450 * GB, 3e-6), Link(50 * GB, 8e-6)),
    "b200": (8, Link(900 * GB, 3e-6), Link(50 * GB, 8e-6)),
    "b300": (8, Link(900 * GB, 3e-6), Link(100 * GB, 8e-6)),
    "gb200": (72, Link(900 * GB, 3e-6), Link(50 * GB, 8e-6)),
    "gb300": (72, Link(900 * GB, 3e-6), Link(100 * GB, 8e-6)),
    "mi300x": (8, Link(448 * GB, 4e-6), Link(50 * GB, 8e-6)),
}
"""Devices of a usual node (all that NVLink joins), the links inside it, and a device's share of those between nodes."""


def preset_cluster(device: str, devices: int | None = None) -> Cluster:
    """Usual nodes of a device."""
    per_node, inside, between = NODES[device]
    whole = Cluster(device, DEVICES[device], per_node, 1, inside, between)
    return whole if devices is None else whole.with_devices(devices)
