"""Synthetic measurements of a healthy job, into which a test plants one fault."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from meshwright.ops.preflight.measurements import (
    DeviceMeasurement,
    DiskMeasurement,
    GroupMeasurement,
    HostLimits,
    HostMeasurements,
    PairMeasurement,
    RankMeasurement,
)

VERSIONS = {"meshwright": "0.2.0", "code": "c0de", "torch": "2.13.0", "python": "3.11.7", "nccl": "2.27.3"}
LIMITS = HostLimits(open_files=65536, shared_memory=64 << 30, locked_memory=None, ports=28232, uses_rdma=True)
GIB = 1 << 30


def healthy_rank(rank: int, host: str, first: bool) -> RankMeasurement:
    """Devices, disks and clocks of one type differ by a few percent."""
    noise = 1 + 0.01 * (rank % 5 - 2)
    device = DeviceMeasurement("cuda", "NVIDIA H100", "bf16", 650e12 * noise, 2.8e12 * noise, 79.0 * GIB, 80.0 * GIB)
    disk = DiskMeasurement("/shared/run", 4000 * GIB, 900e6 * noise, True, "token host-0", rank == 0)
    return RankMeasurement(
        rank,
        host,
        f"boot-{host}",
        dict(VERSIONS),
        device,
        clock_offset=0.002 * noise,
        clock_error=1e-4,
        limits=LIMITS if first else None,
        disk=disk if first else None,
    )


def healthy_job(hosts: int = 4, per_host: int = 2, meets: bool = True) -> HostMeasurements:
    """A job whose ranks are sharded within hosts and replicated across them. Every host `meets` every other one."""
    names = [f"host-{number}" for number in range(hosts)]
    ranks = [
        healthy_rank(host * per_host + local, names[host], local == 0)
        for host in range(hosts)
        for local in range(per_host)
    ]
    pairs = [
        PairMeasurement(first, second, 40e9 * (1 + 0.02 * (number % 3)), 12e-6, 256 << 20)
        for number, (first, second) in enumerate(combinations(names if meets else [], 2))
    ]
    total = hosts * per_host
    within = [range(host * per_host, (host + 1) * per_host) for host in range(hosts)]
    across = [range(local, total, per_host) for local in range(per_host)]
    groups = [GroupMeasurement("shard", "all_gather", tuple(group), 64 << 20, 4e-4) for group in within]
    groups += [GroupMeasurement("replicate", "all_reduce", tuple(group), 64 << 20, 3e-3) for group in across]
    return HostMeasurements(tuple(ranks), tuple(pairs), tuple(groups), seconds=8.0)


def change_rank(job: HostMeasurements, rank: int, **changes: object) -> HostMeasurements:
    """Replaces fields of one rank."""
    return replace(job, ranks=tuple(replace(row, **changes) if row.rank == rank else row for row in job.ranks))


def change_device(job: HostMeasurements, rank: int, **changes: object) -> HostMeasurements:
    return change_rank(job, rank, device=replace(job.ranks[rank].device, **changes))


def change_disk(job: HostMeasurements, rank: int, **changes: object) -> HostMeasurements:
    return change_rank(job, rank, disk=replace(job.ranks[rank].disk, **changes))


def slow_pairs(job: HostMeasurements, *slow: tuple[str, str], factor: float = 0.2) -> HostMeasurements:
    pairs = (replace(pair, bandwidth=pair.bandwidth * factor) if pair.hosts in slow else pair for pair in job.pairs)
    return replace(job, pairs=tuple(pairs))


def slow_host(job: HostMeasurements, host: str, factor: float = 0.2) -> HostMeasurements:
    """Every pair of the host is slow."""
    return slow_pairs(job, *(pair.hosts for pair in job.pairs if host in pair.hosts), factor=factor)
