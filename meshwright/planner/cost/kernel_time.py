"""How long one device computes: matrices by their shapes, attention, and what only moves memory.

A matrix product runs in tiles, and tiles in waves over the device's multiprocessors: the last wave is rarely full, and
a product that is smaller than one wave leaves the rest idle. What does no products is bound by memory, and counts by
the bytes that it reads and writes. A kernel takes a moment to begin, and the host a moment to ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log2

from meshwright.config.dtypes import PRECISION_BYTES
from meshwright.planner.hardware.cluster import Device, MatmulRate
from meshwright.planner.workload.trainer_profile import TrainerProfile

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.78), (64, 64, 0.6))
"""Rows, columns, and the share of the device's rate that a wave of such tiles reaches."""
RAMP = 128
"""Columns of the inner dimension that a tile loses on filling and emptying its pipeline."""
LAUNCH = 2.5e-6
"""Seconds between two kernels of a stream."""
MISALIGNED = {1: 7.0, 2: 2.6, 4: 3.0}
"""How much longer a product takes whose rows do not begin at 16 bytes, by the power of two that its sizes divide by."""


@dataclass(frozen=True)
class KernelRate:
    """What kernels of one precision reach on one device."""

    flops: float
    """a second, of large products, for as long as a run lasts"""
    bandwidth: float
    """bytes a second"""
    processors: int
    size: float
    """bytes of an element"""
    misaligned: float = 1.0
    measured: tuple[MatmulRate, ...] = ()
    """products of this precision on this device, where somebody measured"""


def kernel_rate(device: Device, precision: str, stack: TrainerProfile) -> KernelRate:
    peak = device.peak_flops.get(precision, device.peak_flops["bf16"])
    reached = (
        peak * device.sustained_fraction.get(precision, device.sustained_fraction["bf16"]) * stack.matmul_efficiency
    )
    size = PRECISION_BYTES[precision]
    if rows := tuple(row for row in device.measured_matmuls if row.precision == precision):
        return KernelRate(
            max(row.flops_per_second for row in rows),
            device.memory_bandwidth,
            0,
            size,
            stack.misalignment_slowdown,
            rows,
        )
    return KernelRate(
        reached,
        device.memory_bandwidth * device.memory_efficiency,
        device.multiprocessors,
        size,
        stack.misalignment_slowdown,
    )


def nearest(measured: tuple[MatmulRate, ...], rows: int, columns: int, inner: int) -> float:
    """The rate of products of about this shape: those measured, each the more the nearer it is, in doublings."""
    weights = [
        1 / (0.1 + log2(row.m / rows) ** 2 + log2(row.n / columns) ** 2 + log2(row.k / inner) ** 2) for row in measured
    ]
    return sum(weight * row.flops_per_second for weight, row in zip(weights, measured, strict=True)) / sum(weights)


@cache
def matmul_time(on: KernelRate, rows: int, columns: int, inner: int, count: int = 1) -> float:
    """Seconds of `count` products of (rows x inner) by (inner x columns), run as one kernel."""
    flops = 2.0 * rows * columns * inner * count
    moved = on.size * count * (rows * inner + inner * columns) + 2 * count * rows * columns
    floor = moved / on.bandwidth
    if on.measured:
        return flops / nearest(on.measured, rows * count, columns, inner)
    if not on.processors:
        return max(flops / on.flops, floor) + LAUNCH
    best = float("inf")
    for tall, wide, share in TILES:
        tiles = ceil(rows / tall) * ceil(columns / wide) * count
        split = max(1, min(on.processors // tiles, inner // 1024)) if tiles < on.processors else 1
        waves = ceil(tiles * split / on.processors)
        work = 2.0 * tall * wide * (inner / split + RAMP) * waves * on.processors
        best = min(best, work / (on.flops * share))
    if wrong := MISALIGNED.get(min(columns & -columns, inner & -inner)):
        best *= wrong * on.misaligned
    return max(best, floor) + LAUNCH


def memory_bound_time(on: KernelRate, moved: float, kernels: float = 1) -> float:
    """Seconds of kernels that read and write so many bytes."""
    return moved / on.bandwidth + kernels * LAUNCH
