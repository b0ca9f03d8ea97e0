"""Describes devices, links and clusters, and holds the table of known GPUs; torch-free.

To add a GPU, add one row to `NODE_TYPES`: the device, the number of devices in one node, the intra-node link and the
inter-node link. Cluster names (`h100:8x16`), cluster files (`like = "h100"`), published runs, the planner's suggestions
and the lookup by torch's device name all read that table. A different network or node size for a known GPU needs no
code: it is a cluster file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.config.device_defaults import DeviceType


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


@dataclass(frozen=True)
class Link:
    """The link between one device and its peers, in one direction."""

    bandwidth: float
    """bytes/s per device that the data sheet states"""
    latency: float
    """seconds per hop of a collective"""
    bandwidth_curve: tuple[tuple[float, float], ...] = ()
    """measured (message bytes, bus bandwidth in bytes/s); if present, it replaces bandwidth and latency"""
    collective_curves: tuple[BandwidthCurve, ...] = ()
    """measured curves by collective and number of ranks; the most specific one is used"""


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


GB, TERA = 1e9, 1e12
MIB = float(1 << 20)


def peak_rates(
    bf16: float,
    fp8: float | None = None,
    fp4: float | None = None,
    fp32: float | None = None,
    fp64: float | None = None,
) -> dict[str, float]:
    """Converts TFLOP/s by precision to FLOP/s, and fills in the precisions that are not given.

    The trainer leaves TF32 off, so fp32 is the rate of the CUDA cores.
    """
    rates = {"bf16": bf16, "fp16": bf16, "fp32": fp32 or bf16 / 2, "fp8": fp8 or bf16, "fp4": fp4 or fp8 or bf16}
    rates["fp64"] = fp64 or rates["fp32"] / 2
    return {precision: rate * TERA for precision, rate in rates.items()}


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


def node_type(
    name: str,
    memory_mib: float,
    memory_gb_per_second: float,
    peak_flops: dict[str, float],
    multiprocessors: int,
    sustained_fraction: dict[str, float],
    devices: int,
    intra_node: Link,
    inter_node: Link,
    post_ampere: bool = True,
) -> NodeType:
    """Builds one row of `NODE_TYPES`."""
    memory, bandwidth = memory_mib * MIB, memory_gb_per_second * GB
    device = Device(name, memory, bandwidth, peak_flops, multiprocessors, sustained_fraction, post_ampere)
    return NodeType(device, devices, intra_node, inter_node)


A100, H100 = peak_rates(312, fp32=19.5, fp64=19.5), peak_rates(989, 1979, fp32=67, fp64=67)
B200, B300 = peak_rates(2250, 4500, 9000, 75, 37), peak_rates(2250, 4500, 13500, 77, 1.2)
GB200, GB300 = peak_rates(2500, 5000, 10000, 80, 40), peak_rates(2500, 5000, 15000, 80, 1.3)
MI300X = peak_rates(1307, 2615, fp32=163, fp64=163)
NVLINK_3, NVLINK_4, NVLINK_5 = Link(300 * GB, 5e-6), Link(450 * GB, 3e-6), Link(900 * GB, 3e-6)
INFINITY_FABRIC = Link(448 * GB, 4e-6)
NETWORK_200G, NETWORK_400G, NETWORK_800G = Link(25 * GB, 8e-6), Link(50 * GB, 8e-6), Link(100 * GB, 8e-6)

# Sources. Rates without sparsity and memory bandwidth: the makers' data sheets of the SXM and OAM boards (A100, H100,
# H200, HGX B200 and B300, GB200 and GB300 NVL72 divided by 72, MI300X). Memory: what nvidia-smi and rocm-smi report, in
# MiB; the 141 GB of an H200's data sheet are GiB, and of the 192 GB of a B200 180 are usable. h100-500w is an H100 with
# slower memory and a 500 W power limit, which published runs used. Intra-node links, one direction: NVLink 3, 4 and 5
# (600, 900 and 1,800 GB/s in both directions), and seven 64 GB/s links of an MI300X. Inter-node links: the adapter per
# device of the makers' own systems, 200 Gb/s (DGX A100), 400 Gb/s (H100, H200, B200, GB200, MI300X) or 800 Gb/s (B300,
# GB300). Latencies per hop are of the order that nccl-tests shows for small messages.
NODE_TYPES: dict[str, NodeType] = {
    node.device.name: node
    for node in (
        # name, memory in MiB, memory bandwidth in GB/s, peak FLOP/s, multiprocessors, sustained fractions of the peak,
        # devices per node, intra-node link, inter-node link
        node_type("a100-40", 40960, 1555, A100, 108, {"bf16": 0.8}, 8, NVLINK_3, NETWORK_200G, post_ampere=False),
        node_type("a100-80", 81920, 2039, A100, 108, {"bf16": 0.8}, 8, NVLINK_3, NETWORK_200G, post_ampere=False),
        node_type("h100", 81559, 3350, H100, 132, sustained(0.66, 0.56), 8, NVLINK_4, NETWORK_400G),
        node_type("h100-500w", 97871, 2400, H100, 132, sustained(0.52, 0.56), 8, NVLINK_4, NETWORK_400G),
        node_type("h200", 143771, 4800, H100, 132, sustained(0.69, 0.66), 8, NVLINK_4, NETWORK_400G),
        node_type("b200", 183359, 7700, B200, 148, sustained(0.68, 0.57, 0.46), 8, NVLINK_5, NETWORK_400G),
        node_type("b300", 275040, 7750, B300, 148, sustained(0.7, 0.62, 0.46), 8, NVLINK_5, NETWORK_800G),
        node_type("gb200", 189471, 8000, GB200, 148, sustained(0.67, 0.52, 0.45), 72, NVLINK_5, NETWORK_400G),
        node_type("gb300", 284208, 8000, GB300, 148, sustained(0.69, 0.71, 0.45), 72, NVLINK_5, NETWORK_800G),
        node_type("mi300x", 196592, 5300, MI300X, 304, sustained(0.5, 0.45), 8, INFINITY_FABRIC, NETWORK_400G),
    )
}
"""Device name -> node type: the one table of known GPUs."""


def preset_cluster(device: str, devices: int | None = None) -> Cluster:
    """Returns one node of a known device, or so many devices in full nodes of it."""
    node = NODE_TYPES[device]
    cluster = Cluster(device, node.device, node.devices, 1, node.intra_node, node.inter_node)
    return cluster if devices is None else cluster.with_devices(devices)
