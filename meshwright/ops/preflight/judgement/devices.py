"""Judges the devices of the ranks: matmul rate, memory bandwidth and free memory. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.base.io import format_bytes, format_si
from meshwright.ops.preflight.expectations import Expectations
from meshwright.ops.preflight.measurements import DeviceMeasurement, HostMeasurements, RankMeasurement
from meshwright.ops.preflight.report import PreflightRow, Verdict, host_row

SLOW_DEVICE = {"cuda": 0.85, "cpu": 0.5}
"""A device is slow below this fraction of its reference, by device type. GPUs of one type differ by a few percent; the
cores of a CPU are shared with other processes."""
SLOW_INFERRED = 0.6
"""The same for a figure that the planner has for the name of the device: boards of one name differ in power limits."""
MIN_FREE_MEMORY = 0.9
"""Fraction of a GPU's memory that is free before a job starts; the contexts of its ranks take less than the rest."""
SLOW_HINTS = {
    "cuda": "look for throttling, other processes and errors on the device (nvidia-smi -q -d PERFORMANCE,ECC)",
    "cpu": "look for other processes on the host, and for a lower clock frequency (lscpu)",
}


@dataclass(frozen=True)
class Reference:
    """What a measured rate is compared with."""

    value: float
    source: str
    """other ranks, or planner"""
    slow: float
    """the device is slow below this fraction of the value"""


def judge_devices(measurements: HostMeasurements, expected: Expectations) -> Iterator[PreflightRow]:
    """Compares each device with the median of the other devices of its name, and with the planner's figure."""
    devices = [rank.device for rank in measurements.ranks if rank.device is not None]
    matmul_rates, bandwidths = rates_by_name(devices, "matmul_rate"), rates_by_name(devices, "memory_bandwidth")
    ranks_on_host = Counter(rank.host for rank in measurements.ranks)
    for rank in measurements.ranks:
        if (device := rank.device) is None:
            continue
        for name, rate, rates, planned, unit in (
            ("matmul rate", device.matmul_rate, matmul_rates, expected.matmul_rate(device), "FLOP/s"),
            ("memory bandwidth", device.memory_bandwidth, bandwidths, expected.memory_bandwidth(device), "B/s"),
        ):
            limit, usual = SLOW_DEVICE[device.type], median_of_others(rates[device.name], rate)
            compared = [Reference(usual, "other ranks", limit)] if usual is not None else []
            if planned is not None:
                compared.append(Reference(planned, "planner", SLOW_INFERRED if expected.inferred else limit))
            yield rate_row(name, rank, device.type, rate, compared, unit)
        yield memory_row(rank, device, expected, ranks_on_host[rank.host])


def rates_by_name(devices: list[DeviceMeasurement], field: str) -> dict[str, list[float]]:
    """Name of a device -> the measured rates of all devices of this name, in ascending order."""
    rates: dict[str, list[float]] = {}
    for device in devices:
        rates.setdefault(device.name, []).append(getattr(device, field))
    return {name: sorted(values) for name, values in rates.items()}


def median_of_others(ascending: list[float], own: float) -> float | None:
    """The median without one occurrence of `own`; None if there are no others. It sorts nothing, since a job may have
    thousands of ranks.
    """
    others = len(ascending) - 1
    if not others:
        return None
    at = bisect_left(ascending, own)
    middle = [index + (index >= at) for index in ((others - 1) // 2, others // 2)]
    return sum(ascending[index] for index in middle) / 2


def rate_row(
    name: str, rank: RankMeasurement, device_type: str, rate: float, compared: list[Reference], unit: str
) -> PreflightRow:
    """The row names the reference that demands most of the device."""
    reference = max(compared, key=lambda reference: reference.slow * reference.value, default=None)
    slow = reference is not None and rate < reference.slow * reference.value
    return host_row(
        "device",
        name,
        rank.host,
        "-" if reference is None else f"{format_si(reference.value)}{unit} ({reference.source})",
        f"{format_si(rate)}{unit}",
        "slow" if slow else "ok",
        SLOW_HINTS[device_type],
        rank=rank.rank,
    )


def memory_row(
    rank: RankMeasurement, device: DeviceMeasurement, expected: Expectations, ranks_on_host: int
) -> PreflightRow:
    """A GPU should be free; on CPU the ranks of a host share its memory, which other programs may use as well."""
    on_cuda = device.type == "cuda"
    needed = (expected.rank_bytes or 0) * (1 if on_cuda else ranks_on_host)
    usual = MIN_FREE_MEMORY * device.total_memory if on_cuda else 0.0
    verdict: Verdict = "broken" if device.free_memory < needed else "differs" if device.free_memory < usual else "ok"
    return host_row(
        "device",
        "free memory",
        rank.host,
        f"at least {format_bytes(max(needed, usual))}" if needed or usual else "-",
        f"{format_bytes(device.free_memory)} of {format_bytes(device.total_memory)}",
        verdict,
        "end the other process on the device (nvidia-smi)" if on_cuda else "end other programs, or use fewer ranks",
        rank=rank.rank,
    )
