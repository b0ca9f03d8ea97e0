"""What the ranks of a preflight measure, as plain values that travel as JSON. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class HostLimits:
    """The limits of a host that distributed training reaches. None: unlimited, or unknown."""

    open_files: int | None = None
    """open files per process (ulimit -n)"""
    shared_memory: int | None = None
    """size of /dev/shm in bytes"""
    locked_memory: int | None = None
    """bytes that a process may lock (ulimit -l)"""
    ports: int | None = None
    """local ports for outgoing connections"""
    uses_rdma: bool = False
    """whether the host has RDMA adapters, for which NCCL locks memory"""


@dataclass(frozen=True)
class DiskMeasurement:
    """The run folder as one host sees it."""

    folder: str
    free_bytes: int | None = None
    """free bytes of its file system; None: unknown, as for an object store"""
    write_rate: float | None = None
    """bytes/s of a file that is written and synced"""
    publishes_once: bool | None = None
    """whether the second of two files published under one name is refused"""
    folder_id: str = ""
    """what this host reads from the file that the first of all hosts published"""
    won: bool = False
    """whether this host published that file"""
    error: str = ""
    """why the folder cannot be used; empty: it can"""


@dataclass(frozen=True)
class DeviceMeasurement:
    """The device of one rank, measured while the devices of all other ranks compute."""

    type: str
    """cpu or cuda"""
    name: str
    precision: str
    """precision of the matmul"""
    matmul_rate: float
    """FLOP/s of a large matmul"""
    memory_bandwidth: float
    """bytes/s that a copy in device memory reads and writes"""
    free_memory: float
    """bytes that were free before this rank allocated anything; on CPU those of the host"""
    total_memory: float


@dataclass(frozen=True)
class RankMeasurement:
    """One rank. What belongs to the host is measured by the first rank of the host."""

    rank: int
    host: str
    boot: str = ""
    """identifies the boot of the kernel: two hosts with one name differ in it"""
    versions: dict[str, str] = field(default_factory=dict)
    """name of a component -> version or fingerprint"""
    device: DeviceMeasurement | None = None
    clock_offset: float = 0.0
    """seconds by which the wall clock is ahead of that of rank 0"""
    clock_error: float = 0.0
    """bound of the error of `clock_offset`"""
    clock_rate: float = 1.0
    """seconds of this host's monotonic clock per second of that of rank 0"""
    limits: HostLimits | None = None
    disk: DiskMeasurement | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RankMeasurement:
        values = dict(record)
        for key, kind in (("device", DeviceMeasurement), ("limits", HostLimits), ("disk", DiskMeasurement)):
            if values.get(key) is not None:
                values[key] = kind(**values[key])
        return cls(**values)


@dataclass(frozen=True)
class PairMeasurement:
    """A ping-pong between the first ranks of two hosts."""

    first: str
    second: str
    bandwidth: float
    """bytes/s in one direction, of the largest message that fits the time"""
    latency: float
    """seconds of the smallest message in one direction"""
    message_bytes: int

    @property
    def hosts(self) -> tuple[str, str]:
        return (self.first, self.second)


@dataclass(frozen=True)
class Reachability:
    """Whether one host can open a connection to another one."""

    source: str
    target: str
    problem: str = ""
    """why not; empty: it can"""


@dataclass(frozen=True)
class GroupMeasurement:
    """One collective in one process group of the layout, while all other groups of the axis run it."""

    axis: str
    collective: str
    ranks: tuple[int, ...]
    message_bytes: int
    """size of the full message"""
    seconds: float
    """seconds of the slowest rank"""


@dataclass(frozen=True)
class HostMeasurements:
    """What all ranks measured; the same on every rank."""

    ranks: tuple[RankMeasurement, ...]
    pairs: tuple[PairMeasurement, ...] = ()
    groups: tuple[GroupMeasurement, ...] = ()
    reached: tuple[Reachability, ...] = ()
    """connections that were tried before the process group was formed"""
    missing_ranks: tuple[int, ...] = ()
    """ranks that did not join in time"""
    not_measured: str = ""
    """why devices and network were not measured; empty: they were"""
    seconds: float = 0.0
    """how long the measurement took"""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts in the order of their first ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    def host_ranks(self) -> dict[str, list[RankMeasurement]]:
        """The ranks of each host."""
        ranks: dict[str, list[RankMeasurement]] = {host: [] for host in self.hosts}
        for rank in self.ranks:
            ranks[rank.host].append(rank)
        return ranks

    def host_of(self, rank: int) -> str:
        return next((row.host for row in self.ranks if row.rank == rank), "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> HostMeasurements:
        return cls(
            tuple(RankMeasurement.from_json(row) for row in record["ranks"]),
            tuple(PairMeasurement(**row) for row in record["pairs"]),
            tuple(GroupMeasurement(**{**row, "ranks": tuple(row["ranks"])}) for row in record["groups"]),
            tuple(Reachability(**row) for row in record["reached"]),
            tuple(record["missing_ranks"]),
            record["not_measured"],
            record["seconds"],
        )
