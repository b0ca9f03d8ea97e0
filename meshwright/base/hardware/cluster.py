"""Describes devices, links and clusters, and holds the table of known GPUs; torch-free.

To add a GPU, add one row to `NODES`: the device, its host, the number of devices in one node, the intra-node link
and the inter-node link. Cluster names (`h100:8x16`), cluster files (`like = "h100"`), published runs, the planner's
suggestions and the lookup by torch's device name all read that table. A different network or node size for a known GPU
needs no code: it is a cluster file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from meshwright.base.config.device_defaults import DeviceType
from meshwright.base.dtypes import PRECISION_BYTES
from meshwright.base.hardware.power import power_limited_fraction
from meshwright.errors import ConfigError

ASSUMED_RATE = "assumed rate: "
"""How a note begins about a rate that no source states."""


@dataclass(frozen=True)
class MatmulRate:
    """The measured rate of a matrix multiplication of an (m x k) matrix by a (k x n) matrix."""

    precision: str
    """precision of the inputs: fp64, fp32, bf16, fp16, fp8 or fp4"""
    m: int
    """rows of the first matrix (tokens)"""
    k: int
    """the inner dimension"""
    n: int
    """columns of the second matrix"""
    flops_per_second: float
    """measured FLOP/s of one device while all devices of the node compute"""


@dataclass(frozen=True)
class BandwidthCurve:
    """The measured bus bandwidth of one collective among a number of ranks, by message size."""

    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send"""
    ranks: int
    """size of the process group"""
    points: tuple[tuple[float, float], ...]
    """(message bytes, bus bandwidth in bytes/s as nccl-tests defines it), ascending in message bytes"""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one rank's share of a CPU host."""

    name: str
    """the planner's name of the device, such as h100"""
    memory: float
    """memory capacity in bytes"""
    memory_bandwidth: float
    """bytes/s that the data sheet states; of a measured machine, bytes/s that a copy reads and writes"""
    peak_flops: dict[str, float]
    """dense FLOP/s by precision that the data sheet states; of a measured machine, the best measured rate"""
    multiprocessors: int = 0
    """number of streaming multiprocessors, over which matmul tiles are scheduled; 0 disables the tile model"""
    sustained_fraction: dict[str, float] = field(default_factory=lambda: {"bf16": 0.65})
    """fraction of `peak_flops` that large matmuls sustain over a long run, by precision; fitted, see docs/planner.md"""
    post_ampere: bool = False
    """whether the device has other matmul instructions than the A100, so that kernels for Ampere lose efficiency"""
    memory_efficiency: float = 0.85
    """fraction of `memory_bandwidth` that memory-bound kernels reach"""
    is_cpu: bool = False
    """whether the host's CPU computes: operator launches are then not asynchronous"""
    measured_matmuls: tuple[MatmulRate, ...] = ()
    """measured matmul rates; if present, they replace the tile model, and `memory_bandwidth` is what kernels reach"""
    host: Literal["x86", "grace"] = "x86"
    """the CPU that launches the kernels"""
    host_bandwidth: float = 50e9
    """bytes/s between the device and host memory, in one direction"""
    power: float = 0.0
    """watts of the data sheet; 0 if unknown"""
    assumed_peaks: tuple[str, ...] = ()
    """precisions whose rate no source states, so that `peak_flops` has that of another one"""
    measured_on: str = ""
    """the device whose runs the sustained fractions are fitted to; empty if they are assumed"""

    @property
    def half_precision(self) -> str:
        """The 16-bit precision of its matrix units: GPUs before the A100 multiply bf16 at the rate of float32."""
        return "fp16" if self.peak_flops["fp16"] > 2 * self.peak_flops["bf16"] else "bf16"

    def assumed_rates(self, precision: str) -> Iterator[str]:
        """Says which of the rates of matrix products in a precision no source states."""
        if any(matmul.precision == precision for matmul in self.measured_matmuls):
            return
        if precision in self.assumed_peaks:
            peak = self.peak_flops[precision] / TERA
            yield f"{ASSUMED_RATE}{peak:.4g} TFLOP/s of {precision} on {self.name}, that of another precision"
        similar = "bf16" if precision == "fp16" else precision
        share = self.sustained_fraction.get(precision, self.sustained_fraction["bf16"])
        rate = f"{ASSUMED_RATE}{precision} matmuls sustain {share:.0%} of the peak of {self.name}"
        if not self.measured_on or similar not in self.sustained_fraction:
            yield f"{rate}, which no run shows"
        elif self.measured_on != self.name:
            yield f"{rate}, as on {self.measured_on}"

    def with_power_limit(self, watts: float) -> Device:
        """Returns this device with clocks that keep another power limit."""
        fractions = {
            precision: power_limited_fraction(fraction, watts, self.power)
            for precision, fraction in self.sustained_fraction.items()
        }
        return replace(self, sustained_fraction=fractions, power=min(watts, self.power) if self.power else watts)


@dataclass(frozen=True)
class Link:
    """The link between one device and its peers, in one direction."""

    bandwidth: float
    """bytes/s per device that the data sheet states"""
    latency: float
    """seconds per hop of a collective"""
    bandwidth_curve: tuple[tuple[float, float], ...] = ()
    """measured (message bytes, bus bandwidth in bytes/s) of a group with all devices of its nodes; if there is one, it
    replaces bandwidth and latency"""
    collective_curves: tuple[BandwidthCurve, ...] = ()
    """measured curves by collective and number of ranks; the most specific one is used"""
    all_reduce_bandwidth: float = 0.0
    """bus bandwidth in bytes/s of an all-reduce that the switch reduces (NVLS); 0 if no switch does"""

    @property
    def hop_latency(self) -> float:
        """Seconds per hop beside the rate of a message: a measured curve contains them."""
        return 0.0 if self.bandwidth_curve else self.latency


@dataclass(frozen=True)
class Cluster:
    """A number of identical nodes."""

    name: str
    """how the user named the cluster"""
    device: Device
    """the device, the same everywhere"""
    devices_per_node: int
    """devices that share the intra-node link"""
    nodes: int
    """number of nodes"""
    intra_node: Link
    """link of one device to the others in its node"""
    inter_node: Link
    """one device's share of the network: the bandwidth of the node's adapters divided by its devices"""
    launch_seconds: float = 0.0
    """measured seconds in which the host launches one operator; 0 if it was not measured"""
    adapters_per_node: int = 0
    """network adapters of a node; 0 for one per device"""

    @property
    def device_count(self) -> int:
        """Number of devices in the cluster."""
        return self.devices_per_node * self.nodes

    @property
    def device_type(self) -> DeviceType:
        """The kind of device, on which the defaults of a run depend."""
        return "cpu" if self.device.is_cpu else "cuda"

    @property
    def size_name(self) -> str:
        """The device and how many there are: `h100:8x2` is two nodes of eight."""
        return f"{self.device.name}:{self.devices_per_node}x{self.nodes}"

    def with_devices(self, devices: int) -> Cluster:
        """Returns a cluster of so many of the same devices: a fraction of one node, or full nodes."""
        devices_per_node = min(self.devices_per_node, devices)
        return replace(self, devices_per_node=devices_per_node, nodes=-(-devices // devices_per_node))


UNKNOWN_HOST = Cluster(
    "unknown", Device("cpu", 1e18, 1e9, {"bf16": 1e9}, is_cpu=True), 1, 1, Link(1e9, 1e-6), Link(1e9, 1e-6)
)
"""Stands for a CPU host that was never measured: bytes do not depend on its rates."""

GB, TERA = 1e9, 1e12
MIB = float(1 << 20)


def peak_rates(
    bf16: float,
    fp8: float | None = None,
    fp4: float | None = None,
    fp32: float | None = None,
    fp64: float | None = None,
) -> dict[str, float]:
    """Converts the TFLOP/s of a data sheet to FLOP/s by precision. fp16 has the rate of bf16.

    The trainer leaves TF32 off, so fp32 is the rate of the CUDA cores.
    """
    rates = {"bf16": bf16, "fp16": bf16, "fp8": fp8, "fp4": fp4, "fp32": fp32, "fp64": fp64}
    return {precision: rate * TERA for precision, rate in rates.items() if rate is not None}


def fill_peak_flops(peaks: dict[str, float]) -> dict[str, float]:
    """Returns a rate for every precision: a missing one gets the rate of the precision that would be used instead."""
    if "bf16" not in peaks and "fp32" not in peaks:
        raise ConfigError("device.peak_tflops has neither bf16 nor fp32", "expected at least one of them")
    filled = dict(peaks)
    filled.setdefault("bf16", peaks.get("fp32", 0.0))
    filled.setdefault("fp32", filled["bf16"] / 2)
    filled.setdefault("fp64", filled["fp32"] / 2)
    filled.setdefault("fp16", filled["bf16"])
    filled.setdefault("fp8", filled["bf16"])
    filled.setdefault("fp4", filled["fp8"])
    return filled


def unstated_precisions(stated: Collection[str]) -> tuple[str, ...]:
    """The precisions whose rates `fill_peak_flops` takes from another one."""
    return tuple(precision for precision in PRECISION_BYTES if precision not in stated)


def sustained(bf16: float, fp8: float, fp4: float = 0) -> dict[str, float]:
    """Returns sustained fractions by precision; fp4 defaults to the fraction of fp8."""
    return {"bf16": bf16, "fp8": fp8, "fp4": fp4 or fp8}


@dataclass(frozen=True)
class NodeType:
    """A node as the maker of the device builds it."""

    device: Device
    devices: int
    """devices in one node, or in one NVLink domain if that is larger"""
    intra_node: Link
    inter_node: Link
    """one device's share of the network between nodes"""


class DeviceHost(NamedTuple):
    """What launches the kernels of a device, and its link to host memory."""

    cpu: Literal["x86", "grace"]
    bandwidth: float
    """bytes/s that a copy between the device and host memory reaches in one direction"""


# Four fifths of PCIe 3 and 4, and of NVLink-C2C, whose Grace two devices of a GB200 share. PCIe 5 reaches 55 of 64 GB/s
# on an H200.
PCIE_3_HOST, PCIE_4_HOST, PCIE_5_HOST = (
    DeviceHost("x86", 12.5 * GB),
    DeviceHost("x86", 25 * GB),
    DeviceHost("x86", 50 * GB),
)
GRACE, SHARED_GRACE = DeviceHost("grace", 360 * GB), DeviceHost("grace", 180 * GB)


def node_type(
    name: str,
    memory_mib: float,
    memory_gb_per_second: float,
    watts: float,
    peak_flops: dict[str, float],
    multiprocessors: int,
    sustained_fraction: dict[str, float],
    measured_on: str,
    post_ampere: bool,
    host: DeviceHost,
    devices: int,
    intra_node: Link,
    inter_node: Link,
) -> NodeType:
    """Builds one row of `NODE_TYPES`. No field has a default, so that no row omits a figure."""
    device = Device(
        name,
        memory_mib * MIB,
        memory_gb_per_second * GB,
        fill_peak_flops(peak_flops),
        multiprocessors,
        sustained_fraction,
        post_ampere,
        host=host.cpu,
        host_bandwidth=host.bandwidth,
        power=watts,
        assumed_peaks=unstated_precisions(peak_flops),
        measured_on=measured_on,
    )
    return NodeType(device, devices, intra_node, inter_node)


A100, H100 = peak_rates(312, fp32=19.5, fp64=19.5), peak_rates(989, 1979, fp32=67, fp64=67)
B200, B300 = peak_rates(2250, 4500, 9000, 75, 37), peak_rates(2250, 4500, 13500, 77, 1.2)
GB200, GB300 = peak_rates(2500, 5000, 10000, 80, 40), peak_rates(2500, 5000, 15000, 80, 1.3)
MI300X = peak_rates(1307, 2615, fp32=163, fp64=163)
V100 = peak_rates(15.7, fp32=15.7, fp64=7.8) | {"fp16": 125 * TERA}
H20, L40S, RTX_4090 = (
    peak_rates(148, 296, fp32=44, fp64=1),
    peak_rates(362, 733, fp32=91.6),
    peak_rates(165, 330, fp32=82.6),
)
NVLINK_2, NVLINK_3, NVLINK_3_EXPORT = Link(150 * GB, 6e-6), Link(300 * GB, 5e-6), Link(200 * GB, 5e-6)
NVLINK_4, NVLINK_4_EXPORT, NVLINK_5 = (
    Link(450 * GB, 3e-6, all_reduce_bandwidth=480 * GB),
    Link(200 * GB, 3e-6, all_reduce_bandwidth=213 * GB),
    Link(900 * GB, 3e-6, all_reduce_bandwidth=845 * GB),
)
NVLINK_4_QUAD = Link(450 * GB, 3e-6)
PCIE_4, PCIE_4_THROUGH_HOST = Link(32 * GB, 10e-6), Link(20 * GB, 15e-6)
INFINITY_FABRIC = Link(448 * GB, 4e-6)
NETWORK_100G, NETWORK_200G = Link(12.5 * GB, 8e-6), Link(25 * GB, 8e-6)
NETWORK_400G, NETWORK_800G = Link(50 * GB, 8e-6), Link(100 * GB, 8e-6)

# Sources. Rates without sparsity and memory bandwidth: the makers' data sheets of the SXM and OAM boards (A100, H100,
# H200, HGX B200 and B300, GB200 and GB300 NVL72 divided by 72, MI300X). Memory: what nvidia-smi and rocm-smi report, in
# MiB; the 141 GB of an H200's data sheet are GiB, and of the 192 GB of a B200 180 are usable. h100-500w is an H100 with
# slower memory and a 500 W power limit, which published runs used. Intra-node links, one direction: NVLink 3, 4 and 5
# (600, 900 and 1,800 GB/s in both directions), and seven 64 GB/s links of an MI300X. Inter-node links: the adapter per
# device of the makers' own systems, 200 Gb/s (DGX A100), 400 Gb/s (H100, H200, B200, GB200, MI300X) or 800 Gb/s (B300,
# GB300). Latencies per hop are of the order that nccl-tests shows for small messages. The export boards A800 and H800
# have NVLink of 400 GB/s in both directions, and the arithmetic of an A100 and H100; an H20 has 148 TFLOP/s and the
# NVLink of an H100. gh200 is a node of four with 200 Gb/s each. L40S and RTX 4090 communicate over PCIe 4, the latter
# through host memory. A V100 multiplies fp16 only; bf16 runs on its float32 cores. Bus bandwidth of an all-reduce that
# NVSwitch reduces: 480 GB/s measured on eight H200s and 845 GB/s on eight B200s, scaled to the link of an H800. The
# sustained fractions of A800, H800 and GH200 are those of A100 and H100; those of H20, V100, L40S, RTX 4090 and MI300X
# are set without a run: power limits bind less, except on an L40S. A plan says so.
# fmt: off
NODES = (
    # name, memory in MiB, memory bandwidth in GB/s, watts (of a GB200 and GB300 without the host), peak FLOP/s,
    # multiprocessors, sustained fractions of the peak, the device whose runs they are fitted to, whether it is newer
    # than an A100, host, devices per node, intra-node link, inter-node link
    node_type("a100-40", 40960, 1555, 400, A100, 108, {"bf16": 0.8}, "a100-40", False, PCIE_4_HOST,
              8, NVLINK_3, NETWORK_200G),
    node_type("a100-80", 81920, 2039, 400, A100, 108, {"bf16": 0.8}, "a100-80", False, PCIE_4_HOST,
              8, NVLINK_3, NETWORK_200G),
    node_type("h100", 81559, 3350, 700, H100, 132, sustained(0.66, 0.6), "h100", True, PCIE_5_HOST,
              8, NVLINK_4, NETWORK_400G),
    node_type("h100-500w", 97871, 2400, 500, H100, 132, sustained(0.52, 0.5), "h100-500w", True, PCIE_5_HOST,
              8, NVLINK_4, NETWORK_400G),
    node_type("h200", 143771, 4800, 700, H100, 132, sustained(0.69, 0.66), "h200", True, PCIE_5_HOST,
              8, NVLINK_4, NETWORK_400G),
    node_type("b200", 183359, 7700, 1000, B200, 148, sustained(0.68, 0.55, 0.46), "b200", True, PCIE_5_HOST,
              8, NVLINK_5, NETWORK_400G),
    node_type("b300", 275040, 7750, 1100, B300, 148, sustained(0.7, 0.62, 0.46), "b300", True, PCIE_5_HOST,
              8, NVLINK_5, NETWORK_800G),
    node_type("gb200", 189471, 8000, 1200, GB200, 148, sustained(0.67, 0.52, 0.45), "gb200", True, SHARED_GRACE,
              72, NVLINK_5, NETWORK_400G),
    node_type("gb300", 284208, 8000, 1400, GB300, 148, sustained(0.69, 0.71, 0.41), "gb300", True, SHARED_GRACE,
              72, NVLINK_5, NETWORK_800G),
    node_type("a800", 81920, 2039, 400, A100, 108, {"bf16": 0.8}, "a100-80", False, PCIE_4_HOST,
              8, NVLINK_3_EXPORT, NETWORK_200G),
    node_type("h800", 81559, 3350, 700, H100, 132, sustained(0.66, 0.6), "h100", True, PCIE_5_HOST,
              8, NVLINK_4_EXPORT, NETWORK_400G),
    node_type("h20", 97871, 4000, 400, H20, 78, sustained(0.85, 0.85), "", True, PCIE_5_HOST,
              8, NVLINK_4, NETWORK_400G),
    node_type("gh200", 97871, 4000, 700, H100, 132, sustained(0.66, 0.6), "h100", True, GRACE,
              4, NVLINK_4_QUAD, NETWORK_200G),
    node_type("v100-32", 32768, 900, 300, V100, 80, {"bf16": 0.75}, "", False, PCIE_3_HOST,
              8, NVLINK_2, NETWORK_100G),
    node_type("l40s", 46068, 864, 350, L40S, 142, sustained(0.6, 0.5), "", True, PCIE_4_HOST,
              8, PCIE_4, NETWORK_200G),
    node_type("rtx4090", 24564, 1008, 450, RTX_4090, 128, sustained(0.8, 0.8), "", True, PCIE_4_HOST,
              8, PCIE_4_THROUGH_HOST, NETWORK_100G),
    node_type("mi300x", 196592, 5300, 750, MI300X, 304, sustained(0.5, 0.45), "", True, PCIE_5_HOST,
              8, INFINITY_FABRIC, NETWORK_400G),
)
# fmt: on
NODE_TYPES: dict[str, NodeType] = {node.device.name: node for node in NODES}
"""Device name -> node type: the one table of known GPUs."""


def preset_cluster(device: str, devices: int | None = None) -> Cluster:
    """Returns one node of a known device, or so many devices in full nodes of it."""
    node = NODE_TYPES[device]
    cluster = Cluster(device, node.device, node.devices, 1, node.intra_node, node.inter_node)
    return cluster if devices is None else cluster.with_devices(devices)


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """Returns a cluster under the keys of `--json`; which rates are assumed is in the notes of a plan."""
    tables = asdict(cluster)
    for key in ("assumed_peaks", "measured_on"):
        del tables["device"][key]
    return tables
