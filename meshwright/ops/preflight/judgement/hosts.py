"""Judges what belongs to a host: its components, clocks, run folder and limits. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from meshwright.base.io import format_bytes, format_seconds
from meshwright.ops.preflight.expectations import Expectations
from meshwright.ops.preflight.measurements import DiskMeasurement, HostLimits, HostMeasurements, RankMeasurement
from meshwright.ops.preflight.report import PreflightRow, Verdict, host_row

MAX_CLOCK_OFFSET = 1.0
"""Seconds between the wall clocks of two hosts above which a row warns."""
MAX_CLOCK_DRIFT = 1e-3
"""Relative difference of the rates of two monotonic clocks above which a row warns."""
SLOW_DISK = 0.33
"""A host is slow if it writes at less than this fraction of the median rate of the other hosts."""
OPEN_FILES_PER_RANK, SPARE_OPEN_FILES = 4, 256
"""Open files of a process: connections to every rank in several process groups, and files of its own."""
PORTS_PER_RANK = 64
"""Local ports on which a rank listens: one per process group and backend. Outgoing connections can share a port."""
SHARED_MEMORY_PER_RANK = 64 << 20
"""Bytes of /dev/shm per rank: NCCL's buffers between the devices of one host, and batches of the data loader."""
COMPONENTS = {
    "meshwright": "install the same version on every host",
    "code": "deploy the same source tree to every host",
    "config": "start every host with the same run file and options",
    "torch": "install the same torch on every host",
    "python": "use the same Python on every host",
    "device type": "make the devices of every host visible (CUDA_VISIBLE_DEVICES), or set launch.device",
    "cuda": "install torch for the same CUDA on every host",
    "nccl": "install the same NCCL on every host, and compare LD_LIBRARY_PATH",
    "driver": "install the same driver on every host",
    "device": "use hosts with the same device, or plan a cluster file for the slowest one",
}
"""Components that must agree -> what to do if they do not."""


def judge_hosts(measurements: HostMeasurements, expected: Expectations) -> Iterator[PreflightRow]:
    """Whether every host and rank takes part, under a name of its own."""
    hosts, ranks = measurements.hosts, measurements.ranks
    if measurements.missing_ranks:
        missing = ", ".join(map(str, measurements.missing_ranks))
        total = len(ranks) + len(measurements.missing_ranks)
        yield PreflightRow(
            "hosts",
            "ranks",
            f"rank(s) {missing}",
            f"{total} ranks",
            f"{len(ranks)} ranks joined, on {', '.join(hosts) or 'no host'}",
            "broken",
            "start the missing ranks, and check that their hosts reach the address of rank 0",
        )
    if expected.hosts is not None:
        agrees = len(hosts) == expected.hosts
        yield PreflightRow(
            "hosts",
            "number of hosts",
            "job",
            str(expected.hosts),
            f"{len(hosts)} ({', '.join(hosts)})",
            "ok" if agrees else "broken",
            ""
            if agrees
            else "start the command on every host, or give hosts names of their own (MESHWRIGHT_HOST_NAME)",
        )
    for host, members in measurements.host_ranks().items():
        boots = {member.boot for member in members if member.boot}
        if len(boots) > 1:
            yield PreflightRow(
                "hosts",
                "host name",
                f"host {host}",
                "one host of this name",
                f"{len(boots)} kernels, ranks {', '.join(str(member.rank) for member in members)}",
                "differs",
                "give each host a name of its own (MESHWRIGHT_HOST_NAME)",
                host,
            )


def judge_versions(measurements: HostMeasurements) -> Iterator[PreflightRow]:
    """Compares the components of the hosts; what most hosts have is expected, and among equals what rank 0 has."""
    hosts = measurements.host_ranks()
    for key, recommendation in COMPONENTS.items():
        versions = {
            host: ", ".join(dict.fromkeys(rank.versions[key] for rank in ranks if key in rank.versions))
            for host, ranks in hosts.items()
        }
        found = {host: version for host, version in versions.items() if version}
        if not found:
            continue
        usual = Counter(found.values()).most_common(1)[0][0]  # the first of equals, which is that of rank 0
        for host, version in found.items():
            verdict: Verdict = "ok" if version == usual else "differs"
            yield host_row("versions", key, host, usual, version, verdict, recommendation)


def judge_clocks(measurements: HostMeasurements) -> Iterator[PreflightRow]:
    """Compares the clocks of the hosts. No decision of Meshwright uses wall-clock time, so these rows only warn."""
    first = {host: ranks[0] for host, ranks in measurements.host_ranks().items()}
    if len(first) < 2 or measurements.not_measured:
        return
    usual = agreed_value([rank.clock_offset for rank in first.values()], MAX_CLOCK_OFFSET)
    for host, rank in first.items():
        offset, drift = rank.clock_offset - usual, abs(rank.clock_rate - 1)
        direction = "ahead" if offset > 0 else "behind"
        yield host_row(
            "clock",
            "wall clock",
            host,
            f"within {MAX_CLOCK_OFFSET:g} s of the other hosts",
            f"{format_seconds(abs(offset))} {direction}, +- {format_seconds(rank.clock_error)}"
            if offset
            else "the same",
            "ok" if abs(offset) <= MAX_CLOCK_OFFSET else "differs",
            "synchronize the clock (chronyc makestep); the logs of the hosts cannot be compared until then",
            advisory=True,
        )
        yield host_row(
            "clock",
            "monotonic clock",
            host,
            f"the rate of rank 0 within {MAX_CLOCK_DRIFT:.1%}",
            f"{drift:.2%} off" if drift >= 1e-4 else "the same",
            "ok" if drift <= MAX_CLOCK_DRIFT else "differs",
            "check the clock source of the kernel (dmesg | grep clocksource); time-outs are off by as much",
            advisory=True,
        )


def agreed_value(values: Sequence[float], tolerance: float) -> float:
    """The value that most others are near to; the first of equals."""
    return max(values, key=lambda value: sum(abs(value - other) <= tolerance for other in values))


def judge_disks(measurements: HostMeasurements, expected: Expectations) -> Iterator[PreflightRow]:
    """The run folder: usable, shared by all hosts, large enough, and as fast on one host as on the others."""
    disks = {host: ranks[0].disk for host, ranks in measurements.host_ranks().items()}
    known = {host: disk for host, disk in disks.items() if disk is not None}
    ids = [disk.folder_id for disk in known.values() if not disk.error]
    usual = Counter(ids).most_common(1)[0][0] if ids else ""
    winners = Counter(disk.folder_id for disk in known.values() if disk.won)
    for host, disk in known.items():
        if disk.error:
            hint = "try --run DIR in a folder that every host can write"
            yield host_row("disk", "run folder", host, "a folder that it can write", disk.error, "broken", hint)
            continue
        shared = disk.folder_id == usual
        yield host_row(
            "disk",
            "run folder",
            host,
            "one folder for all hosts",
            disk.folder if shared else f"a folder of its own: {disk.folder}",
            "ok" if shared else "differs",
            "mount the same file system on every host, or try --run DIR on a shared one",
        )
        once = bool(disk.publishes_once) and winners[disk.folder_id] == 1
        yield host_row(
            "disk",
            "publish if absent",
            host,
            "one of several writers succeeds",
            "one" if once else "several",
            "ok" if once else "broken",
            "try --run DIR on a file system whose hard links are atomic across hosts",
        )
        if disk.free_bytes is not None:
            yield free_space_row(host, disk.free_bytes, expected)
        if disk.write_rate is not None:
            yield write_rate_row(host, disk.write_rate, [d for name, d in known.items() if name != host])


def free_space_row(host: str, free: int, expected: Expectations) -> PreflightRow:
    """Compares the free space with the checkpoints that the run keeps, and one that is being written."""
    needed, size = expected.disk_bytes, expected.checkpoint_bytes
    return host_row(
        "disk",
        "free space",
        host,
        "more than 0 B"
        if needed is None or size is None
        else f"{format_bytes(needed)} ({expected.kept_checkpoints} checkpoints of {format_bytes(size)})",
        format_bytes(free),
        "ok" if free >= (needed or 1) else "broken",
        "free space, try a smaller checkpoint.keep, or --run DIR on a larger disk",
    )


def write_rate_row(host: str, rate: float, others: list[DiskMeasurement]) -> PreflightRow:
    rates = [disk.write_rate for disk in others if disk.write_rate is not None]
    usual = median(rates) if rates else None
    return host_row(
        "disk",
        "write and sync rate",
        host,
        "-" if usual is None else f"{format_bytes(usual)}/s (other hosts)",
        f"{format_bytes(rate)}/s",
        "ok" if usual is None or rate >= SLOW_DISK * usual else "slow",
        "check the mount and the network of the storage on this host",
    )


def judge_limits(measurements: HostMeasurements) -> Iterator[PreflightRow]:
    """The limits of each host that the job reaches; those that do not matter on its devices have no row."""
    size = len(measurements.ranks) + len(measurements.missing_ranks)
    for host, ranks in measurements.host_ranks().items():
        for limits in [rank.limits for rank in ranks[:1] if rank.limits is not None]:
            for name, needed, found, enough, command in host_limits(ranks, limits, size):
                verdict: Verdict = "ok" if enough else "differs"
                yield host_row("limits", name, host, needed, found, verdict, f"raise the limit: {command}")


def host_limits(
    ranks: list[RankMeasurement], limits: HostLimits, size: int
) -> Iterator[tuple[str, str, str, bool, str]]:
    """Yields (limit, what is needed, what was found, whether that is enough, how to raise it)."""
    on_cuda = any(rank.device is not None and rank.device.type == "cuda" for rank in ranks)
    if (found := limits.open_files) is not None:
        needed = SPARE_OPEN_FILES + OPEN_FILES_PER_RANK * size
        yield "open files", f"at least {needed:,}", f"{found:,}", found >= needed, f"ulimit -n {max(65536, needed)}"
    if (found := limits.ports) is not None and size > 1:
        needed = PORTS_PER_RANK * len(ranks)
        command = "sysctl net.ipv4.ip_local_port_range='1024 65535'"
        yield "local ports", f"at least {needed:,}", f"{found:,}", found >= needed, command
    if (found := limits.shared_memory) is not None and on_cuda and len(ranks) > 1:
        needed = SHARED_MEMORY_PER_RANK * len(ranks)
        command = "docker run --shm-size=1g, or --ipc=host"
        yield "/dev/shm", f"at least {format_bytes(needed)}", format_bytes(found), found >= needed, command
    if on_cuda and limits.uses_rdma:  # NCCL registers its buffers with the RDMA adapters
        found = limits.locked_memory
        amount = "unlimited" if found is None else format_bytes(found)
        command = "ulimit -l unlimited, or LimitMEMLOCK=infinity in systemd"
        yield "locked memory", "unlimited (RDMA)", amount, found is None, command
