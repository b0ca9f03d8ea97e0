"""This machine as a cluster: one rank a device, all of them measured at once, in bounded time."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.config import LaunchConfig
from meshwright.errors import ConfigError
from meshwright.launch.ranks import run_ranks
from meshwright.measure.collectives import measure_curves
from meshwright.measure.kernels import measure_launch, measure_matmuls, measure_memory_bandwidth
from meshwright.measure.timing import TimingGroup
from meshwright.parallel.world import World
from meshwright.planner.hardware.cluster import BandwidthCurve, Cluster, Device, Link, MatmulRate
from meshwright.planner.hardware.cluster_file import fill_peak_flops

MOST_RANKS = 64
CORES = 4
"""Ranks on a machine without accelerators, at most, unless more are asked for."""
BUSY = 0.5
"""Load a core from which on figures are doubtful."""
SHARES = {"products": 0.45, "copy": 0.05, "launch": 0.02, "curves": 0.48}
"""of the time"""
DIGITS = 4


@dataclass(frozen=True)
class MachineMeasurement:
    """What the ranks found; the same on each."""

    device: str
    memory: float
    matmuls: list[MatmulRate]
    memory_bandwidth: float
    launch_seconds: float
    curves: list[BandwidthCurve]
    is_cpu: bool


def measure(seconds: float, ranks: int | None = None) -> tuple[Cluster, list[str]]:
    """This machine, measured for about so many seconds, and remarks on how."""
    if not 1 <= seconds <= 600:
        raise ConfigError(f"--seconds {seconds:g} is out of range", "allowed: from 1 to 600")
    devices = torch.cuda.device_count()
    count = ranks if ranks is not None else devices or min(CORES, len(os.sched_getaffinity(0)))
    most = devices or MOST_RANKS
    if not 1 <= count <= most:
        raise ConfigError(f"--ranks {count} is out of range", f"allowed: from 1 to {most}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    launch = LaunchConfig(
        rendezvous_timeout=60.0, collective_timeout=60.0 + 2 * seconds, device="cuda" if devices else "cpu"
    )
    seen: MachineMeasurement = run_ranks(look, count, seconds, launch=launch, timeout=120.0 + 4 * seconds)[0]
    kind = "NCCL" if devices else "Gloo"
    remarks = [
        f"measured on {socket.gethostname()}, {date.today()}, with torch {torch.__version__}",
        f"ranks: {count}, CPU threads of each: {launch.threads}; all at once; medians; {kind} curves, not smoothed",
    ]
    if load > BUSY * cores:
        remarks.append(f"the machine was busy: a load of {load:.1f} on {cores} cores; measure again when it is idle")
    return measured_cluster(seen, count), remarks


def look(world: World, seconds: float) -> MachineMeasurement:
    """A rank's part of the measurement."""
    crew = TimingGroup(world.size, world.device)
    with torch.no_grad():
        found = MachineMeasurement(
            device_name(world.device),
            device_memory(world),
            measure_matmuls(crew, SHARES["products"] * seconds),
            measure_memory_bandwidth(crew, SHARES["copy"] * seconds),
            measure_launch(crew, SHARES["launch"] * seconds),
            all_curves(world, SHARES["curves"] * seconds) if world.size > 1 else [],
            world.device.type == "cpu",
        )
    return found


def all_curves(world: World, budget: float) -> list[BandwidthCurve]:
    """Over two ranks, four, and so on to all of them; those that are left out of a group wait for it."""
    sizes = [*(1 << power for power in range(1, 7) if 1 << power < world.size), world.size]
    found = []
    for size in sizes:
        peers = list(range(size))
        group = dist.new_group(peers) if size < world.size else None
        if world.rank in peers:
            found += measure_curves(TimingGroup(size, world.device, group), peers, budget / len(sizes))
        world.all_reduce(torch.zeros(()), "measured").wait()
    return found


def measured_cluster(seen: MachineMeasurement, ranks: int) -> Cluster:
    rows = tuple(MatmulRate(row.precision, row.m, row.k, row.n, short(row.flops_per_second)) for row in seen.matmuls)
    peak: dict[str, float] = {}
    for row in rows:
        peak[row.precision] = max(row.flops_per_second, peak.get(row.precision, 0.0))
    device = Device(
        seen.device,
        seen.memory,
        short(seen.memory_bandwidth),
        fill_peak_flops(peak),
        is_cpu=seen.is_cpu,
        measured_matmuls=rows,
    )
    link = link_of_curves(seen.curves, ranks) if ranks > 1 else Link(device.memory_bandwidth, 0.0)
    return Cluster("here", device, ranks, 1, link, link, {"launch": short(seen.launch_seconds)})


def link_of_curves(found: list[BandwidthCurve], ranks: int) -> Link:
    """Bandwidth is the best of all-reduce among all ranks; latency what a hop of its smallest message took."""
    rounded = tuple(
        BandwidthCurve(row.collective, row.ranks, tuple((size, short(rate)) for size, rate in row.points))
        for row in found
    )
    [whole] = [row for row in rounded if (row.collective, row.ranks) == ("all_reduce", ranks)]
    size, rate = whole.points[0]
    hop = size / ranks / rate  # a ring sends a part of the message in each of its hops
    return Link(max(rate for _, rate in whole.points), short(hop), whole.points, rounded)


def short(value: float) -> float:
    """No more digits than a measurement has."""
    return float(f"{value:.{DIGITS}g}")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def device_memory(world: World) -> float:
    """Bytes that a rank may have: a device's, or its part of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[1])
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # a container's share; the file says "max" where there is no limit
        whole = min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return float(whole // world.size)
