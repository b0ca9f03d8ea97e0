"""The machines: devices, what they compute, hold and move, and the links inside and between nodes; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Device:
    name: str
    memory: float
    """bytes"""
    stream: float
    """bytes a second that kernels read and write"""
    peak: dict[str, float]
    """FLOP a second by precision, dense, as the maker prints it"""
    processors: int = 0
    """multiprocessors, over which a product's tiles are dealt out; 0: unknown, and no tiles are counted"""
    sustained: dict[str, float] = field(default_factory=lambda: {"bf16": 1.0})
    """share of the peak that large products reach for as long as a run lasts: fitted, see docs/planner.md"""
    newer: bool = False
    """whether products have other instructions than an A100's, for which kernels had to be written anew"""
    streamed: float = 0.85
    """share of `stream` that kernels reach"""


@dataclass(frozen=True)
class Link:
    """What one device sends, in one direction, to its peers."""

    bandwidth: float
    """bytes a second a device, as the maker prints it"""
    latency: float
    """seconds that one hop of a collective takes"""
    curve: tuple[tuple[float, float], ...] = ()
    """measured (bytes of a message, bytes a second on the bus), where somebody measured; else latency and bandwidth"""


@dataclass(frozen=True)
class Cluster:
    name: str
    device: Device
    per_node: int
    nodes: int
    inside: Link
    between: Link
    """a device's share: of a node's adapters, divided by its devices"""
    measured: dict[str, float] = field(default_factory=dict)
    """figures of this machine that take the place of fitted ones, by the name of what they replace"""

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes

    def of(self, devices: int) -> Cluster:
        """So many of the same devices: whole nodes, or a part of one."""
        per_node = min(self.per_node, devices)
        return replace(self, per_node=per_node, nodes=-(-devices // per_node))


GB, TERA = 1e9, 1e12
GIB = float(1 << 30)


def peaks(
    bf16: float, fp8: float | None = None, fp4: float | None = None, fp32: float | None = None
) -> dict[str, float]:
    """In TFLOP/s; fp32 is what matrix units do with float32 inputs (TF32)."""
    rates = {"bf16": bf16, "fp16": bf16, "fp32": fp32 or bf16 / 2, "fp8": fp8 or bf16, "fp4": fp4 or fp8 or bf16}
    return {precision: rate * TERA for precision, rate in rates.items()}


def sustained(bf16: float, fp8: float, fp4: float = 0) -> dict[str, float]:
    return {"bf16": bf16, "fp8": fp8, "fp4": fp4 or fp8}


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40", 40 * GIB, 1555 * GB, peaks(312, fp32=156), 108, {"bf16": 0.8}),
        Device("a100-80", 80 * GIB, 2039 * GB, peaks(312, fp32=156), 108, {"bf16": 0.8}),
        Device("h100", 80 * GIB, 3350 * GB, peaks(989, 1979, fp32=494), 132, sustained(0.66, 0.56), True),
        Device("h100-500w", 96 * GIB, 2400 * GB, peaks(989, 1979, fp32=494), 132, sustained(0.52, 0.56), True),
        Device("h200", 141 * GB, 4800 * GB, peaks(989, 1979, fp32=494), 132, sustained(0.69, 0.66), True),
        Device("b200", 192 * GB, 8000 * GB, peaks(2250, 4500, 9000, 1100), 148, sustained(0.68, 0.57, 0.46), True),
        Device("b300", 288 * GB, 8000 * GB, peaks(2250, 4500, 13500, 1100), 148, sustained(0.7, 0.62, 0.46), True),
        Device("gb200", 192 * GB, 8000 * GB, peaks(2450, 4900, 9800, 1225), 148, sustained(0.68, 0.53, 0.46), True),
        Device("gb300", 288 * GB, 8000 * GB, peaks(2450, 4900, 14700, 1225), 148, sustained(0.7, 0.72, 0.46), True),
        Device("mi300x", 192 * GB, 5300 * GB, peaks(1307, 2615, fp32=653), 304, sustained(0.5, 0.45), True),
    )
}
"""Dense rates and capacities as their makers print them."""

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
"""Devices of a usual node, the links inside it, and a device's share of the links between nodes."""


def preset(device: str, devices: int | None = None) -> Cluster:
    """Usual nodes of a device."""
    per_node, inside, between = NODES[device]
    whole = Cluster(device, DEVICES[device], per_node, 1, inside, between)
    return whole if devices is None else whole.of(devices)
