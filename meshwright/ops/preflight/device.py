"""Measures the device of a rank while all other ranks measure theirs: matmul, copy, free memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from meshwright.core.faults import fail_point
from meshwright.core.parallel.world import World
from meshwright.ops.measure.kernels import COPY_BYTES, MatmulShape, prepare_matmul
from meshwright.ops.measure.machine import device_name
from meshwright.ops.measure.timing import MIN_BATCHES, TimingGroup
from meshwright.ops.preflight.measurements import DeviceMeasurement

MATMULS: dict[str, tuple[str, MatmulShape]] = {"cpu": ("fp32", (512, 512, 512)), "cuda": ("bf16", (8192, 8192, 8192))}
"""Device type -> precision and shape of the matmul."""
MATMUL_SHARE = 0.7
"""Fraction of the time for the matmul; the rest is for the copy."""
MAX_BATCHES = 100_000
"""Limit on the number of timed batches."""


def measure_device(world: World, seconds: float) -> DeviceMeasurement:
    """Measures the device of this rank for about so many seconds. The ranks start together."""
    free, total = read_memory(world.device)
    kind = world.device.type
    precision, (m, k, n) = MATMULS[kind]
    matmul = prepare_matmul(precision, (m, k, n), world.device)
    source = torch.ones(COPY_BYTES[kind] // 4, device=world.device)
    target = torch.zeros_like(source)

    def matmul_call() -> None:
        fail_point("preflight.matmul", 0)
        matmul()

    world.all_reduce(torch.zeros(()), "preflight devices").wait()
    with torch.no_grad():
        matmul_seconds = call_seconds(world.device, matmul_call, MATMUL_SHARE * seconds)
        copy_seconds = call_seconds(world.device, lambda: target.copy_(source), (1 - MATMUL_SHARE) * seconds)
    return DeviceMeasurement(
        kind,
        device_name(world.device),
        precision,
        2.0 * m * k * n / matmul_seconds,
        2.0 * COPY_BYTES[kind] / copy_seconds,
        free,
        total,
    )


def call_seconds(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Returns the seconds of one call. On CUDA it is the median, which shows a device that throttles; on CPU it is the
    minimum, since other processes on the cores only ever add to it.
    """
    group = TimingGroup(1, device)
    group.time_calls(call, 2)
    times: list[float] = []
    start = time.monotonic()
    while len(times) < MIN_BATCHES or (time.monotonic() - start < seconds and len(times) < MAX_BATCHES):
        times.append(group.time_calls(call, 1))
    return max(1e-9, median(times) if device.type == "cuda" else min(times))


def read_memory(device: torch.device) -> tuple[float, float]:
    """Returns the free and the total bytes of a GPU, or of this host within the limit of its container."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(free), float(total)
    total_bytes = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free_bytes = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError, IndexError):  # memory that the kernel can reclaim is free as well
        text = Path("/proc/meminfo").read_text()
        free_bytes = 1024.0 * int(text.split("MemAvailable:")[1].split()[0])
    with suppress(OSError, ValueError):  # the limit of a container; the file contains "max" if there is none
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total_bytes, free_bytes = min(total_bytes, limit), min(free_bytes, max(0, limit - used))
    return free_bytes, total_bytes
