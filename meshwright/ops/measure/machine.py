"""Measures this machine as a cluster: one rank per device, all ranks at the same time, within a time budget."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.base.config import LaunchConfig
from meshwright.base.hardware.cluster import (
    BandwidthCurve,
    Cluster,
    Device,
    Link,
    MatmulRate,
    fill_peak_flops,
    unstated_precisions,
)
from meshwright.base.hardware.processor import processor_name
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError
from meshwright.ops.measure.collectives import measure_curves
from meshwright.ops.measure.kernels import measure_launch, measure_matmuls, measure_memory_bandwidth
from meshwright.ops.measure.timing import TimingGroup

MAX_CPU_RANKS = 64
"""Limit of --ranks on a machine without GPUs."""
DEFAULT_CPU_RANKS = 4
"""Default number of ranks on a machine without GPUs, if it has as many cores."""
BUSY_LOAD = 0.5
"""Load per core above which the result is marked as unreliable."""
TIME_SHARES = {"matmuls": 0.45, "memory": 0.05, "launch": 0.02, "collectives": 0.48}
"""Fractions of the time budget."""
SIGNIFICANT_DIGITS = 4
"""Precision of a measured value."""


@dataclass(frozen=True)
class MachineMeasurement:
    """What the ranks measured; the same on every rank."""

    device: str
    """name of the device, as torch or the kernel reports it"""
    memory: float
    """memory capacity per rank, in bytes"""
    matmuls: list[MatmulRate]
    memory_bandwidth: float
    """bytes/s that a copy reads and writes"""
    launch_seconds: float
    """seconds per operator launch"""
    curves: list[BandwidthCurve]
    """bandwidth curves by collective and number of ranks; empty on one rank"""
    is_cpu: bool
    """whether the CPU computes"""


def measure(seconds: float, ranks: int | None = None) -> tuple[Cluster, list[str]]:
    """Measures this machine for about `seconds` seconds; returns it as a cluster, and remarks on the conditions."""
    if not 1 <= seconds <= 600:
        raise ConfigError(f"--seconds {seconds:g} is out of range", "expected 1 to 600")
    devices, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    count = ranks if ranks is not None else devices or min(DEFAULT_CPU_RANKS, cores)
    max_ranks = devices or MAX_CPU_RANKS
    if not 1 <= count <= max_ranks:
        raise ConfigError(f"--ranks {count} is out of range", f"expected 1 to {max_ranks}")
    load = os.getloadavg()[0]
    launch = LaunchConfig(
        rendezvous_timeout=60.0, collective_timeout=60.0 + 2 * seconds, device="cuda" if devices else "cpu"
    )
    measurement: MachineMeasurement = run_ranks(
        measure_rank, count, seconds, launch=launch, timeout=120.0 + 4 * seconds
    )[0]
    backend = "NCCL" if devices else "Gloo"
    remarks = [
        f"measured on {socket.gethostname()}, {date.today()}, with torch {torch.__version__}",
        f"ranks: {count}, all at once; CPU threads per rank: {launch.threads}; medians; {backend} curves, not smoothed",
    ]
    if load > BUSY_LOAD * cores:
        remarks.append(f"the machine was busy (load {load:.1f} on {cores} cores): measure again when it is idle")
    return measured_cluster(measurement, count), remarks


def measure_rank(world: World, seconds: float) -> MachineMeasurement:
    """Runs the measurement on one rank."""
    group = TimingGroup(world.size, world.device)
    with torch.no_grad():
        return MachineMeasurement(
            device_name(world.device),
            device_memory(world),
            measure_matmuls(group, TIME_SHARES["matmuls"] * seconds),
            measure_memory_bandwidth(group, TIME_SHARES["memory"] * seconds),
            measure_launch(group, TIME_SHARES["launch"] * seconds),
            measure_all_curves(world, TIME_SHARES["collectives"] * seconds) if world.size > 1 else [],
            world.device.type == "cpu",
        )


def measure_all_curves(world: World, budget: float) -> list[BandwidthCurve]:
    """Measures the collectives on groups of 2, 4, ... ranks and on all ranks; ranks outside a group wait for it."""
    sizes = [*(1 << power for power in range(1, 7) if 1 << power < world.size), world.size]
    curves = []
    for size in sizes:
        peers = list(range(size))
        group = dist.new_group(peers) if size < world.size else None
        if world.rank in peers:
            curves += measure_curves(TimingGroup(size, world.device, group), peers, budget / len(sizes))
        world.all_reduce(torch.zeros(()), "measured").wait()
    return curves


def measured_cluster(measurement: MachineMeasurement, ranks: int) -> Cluster:
    """Converts a measurement to a cluster of one node with one device per rank."""
    matmuls = tuple(
        MatmulRate(row.precision, row.m, row.k, row.n, round_measurement(row.flops_per_second))
        for row in measurement.matmuls
    )
    peak_flops: dict[str, float] = {}
    for row in matmuls:
        peak_flops[row.precision] = max(row.flops_per_second, peak_flops.get(row.precision, 0.0))
    device = Device(
        measurement.device,
        measurement.memory,
        round_measurement(measurement.memory_bandwidth),
        fill_peak_flops(peak_flops),
        is_cpu=measurement.is_cpu,
        measured_matmuls=matmuls,
        assumed_peaks=unstated_precisions(peak_flops),
    )
    link = measured_link(measurement.curves, ranks) if ranks > 1 else Link(device.memory_bandwidth, 0.0)
    return Cluster("here", device, ranks, 1, link, link, round_measurement(measurement.launch_seconds))


def measured_link(curves: list[BandwidthCurve], ranks: int) -> Link:
    """Converts measured curves to a link.

    The bandwidth is the best of an all-reduce over all ranks; the latency is that of one hop of its smallest message.
    """
    rounded = tuple(
        BandwidthCurve(
            curve.collective, curve.ranks, tuple((size, round_measurement(rate)) for size, rate in curve.points)
        )
        for curve in curves
    )
    [all_reduce] = [curve for curve in rounded if (curve.collective, curve.ranks) == ("all_reduce", ranks)]
    size, rate = all_reduce.points[0]
    hop = size / ranks / rate  # each hop of a ring sends 1 / ranks of the message
    bandwidth = max(rate for _, rate in all_reduce.points)
    return Link(bandwidth, round_measurement(hop), all_reduce.points, rounded)


def round_measurement(value: float) -> float:
    """Rounds to the digits that a measurement is accurate to."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or the model name of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def device_memory(world: World) -> float:
    """Returns the bytes that one rank may use: the memory of its GPU, or its share of the host's memory."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[1])
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # the limit of a container; the file contains "max" if there is none
        host_bytes = min(host_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return float(host_bytes // world.size)
