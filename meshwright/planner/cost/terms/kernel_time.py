"""Time of kernels on one device: matrix products by their shape, and memory-bound kernels by the bytes they move.

A matrix product runs in tiles, and tiles run in waves over the device's multiprocessors. The last wave is rarely full,
and a product smaller than one wave leaves multiprocessors idle (wave quantization). Every kernel also has a launch gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log2

from meshwright.base.dtypes import PRECISION_BYTES
from meshwright.base.hardware.cluster import Device, MatmulRate
from meshwright.planner.workload.optimizer_bytes import LowRankFactors
from meshwright.planner.workload.trainer_profile import TrainerProfile

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.78), (64, 64, 0.6))
"""Rows, columns, and the fraction of the device's rate that a full wave of such tiles reaches."""
PROLOGUE_DEPTH = 128
"""Elements of the inner dimension that a tile loses on filling and draining its software pipeline."""
GROUP_TILE_ROWS = 128
"""Rows of a tile of a grouped matmul, to which kernels pad the rows of each expert (CUTLASS, DeepGEMM)."""
LAUNCH_GAP = 2.5e-6
"""Seconds between two kernels of a stream."""
MISALIGNED = {1: 7.0, 2: 2.6, 4: 3.0}
"""The slowdown of a product whose rows are not aligned to 16 bytes, by the largest power of two that divides the
lengths of the rows of its operands and of its result in memory."""


MatmulShape = tuple[int, int, int, int]
"""rows, columns, inner, count"""


@dataclass(frozen=True)
class KernelRate:
    """The rates that kernels of one precision reach on one device."""

    flops: float
    """FLOP/s of large matrix products, sustained over a run"""
    bandwidth: float
    """memory bandwidth in bytes per second"""
    multiprocessors: int
    element_bytes: float
    misalignment_slowdown: float = 1.0
    measured: tuple[MatmulRate, ...] = ()
    """measured products of this precision on this device, if there are any"""


def kernel_rate(device: Device, precision: str, trainer: TrainerProfile) -> KernelRate:
    peak = device.peak_flops.get(precision, device.peak_flops["bf16"])
    sustained = device.sustained_fraction.get(precision, device.sustained_fraction["bf16"])
    element_bytes, slowdown = PRECISION_BYTES[precision], trainer.misalignment_slowdown
    if measured := tuple(matmul for matmul in device.measured_matmuls if matmul.precision == precision):
        fastest = max(matmul.flops_per_second for matmul in measured)
        return KernelRate(fastest, device.memory_bandwidth, 0, element_bytes, slowdown, measured)
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    flops = peak * sustained * trainer.matmul_efficiency
    return KernelRate(flops, bandwidth, device.multiprocessors, element_bytes, slowdown)


def interpolate_rate(measured: tuple[MatmulRate, ...], rows: int, columns: int, inner: int) -> float:
    """The mean rate of the measured products, weighted by the inverse squared distance of their shapes in octaves."""
    weights = [
        1 / (0.1 + log2(matmul.m / rows) ** 2 + log2(matmul.n / columns) ** 2 + log2(matmul.k / inner) ** 2)
        for matmul in measured
    ]
    rates = zip(weights, measured, strict=True)
    return sum(weight * matmul.flops_per_second for weight, matmul in rates) / sum(weights)


@cache
def matmul_time(
    rate: KernelRate, rows: int, columns: int, inner: int, count: int = 1, transposed: bool = False
) -> float:
    """Seconds of `count` products of (rows x inner) by (inner x columns) that run as one kernel. `transposed`: the
    first operand is stored as (inner x rows), as the output gradients are from which a weight gradient is computed, so
    that the inner dimension is not the length of a row in memory.
    """
    flops = 2.0 * rows * columns * inner * count
    moved_bytes = rate.element_bytes * count * (rows * inner + inner * columns) + 2 * count * rows * columns
    memory_time = moved_bytes / rate.bandwidth
    if rate.measured:
        return flops / interpolate_rate(rate.measured, rows * count, columns, inner)
    if not rate.multiprocessors:
        return max(flops / rate.flops, memory_time) + LAUNCH_GAP
    best = float("inf")
    for tile_rows, tile_columns, efficiency in TILES:
        tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns) * count
        split_k = max(1, min(rate.multiprocessors // tiles, inner // 1024)) if tiles < rate.multiprocessors else 1
        waves = ceil(tiles * split_k / rate.multiprocessors)
        work = 2.0 * tile_rows * tile_columns * (inner / split_k + PROLOGUE_DEPTH) * waves * rate.multiprocessors
        best = min(best, work / (rate.flops * efficiency))
    row_length = rows if transposed else inner
    if slowdown := MISALIGNED.get(min(columns & -columns, row_length & -row_length)):
        best *= slowdown * rate.misalignment_slowdown
    return max(best, memory_time) + LAUNCH_GAP


def grouped_matmul_time(rate: KernelRate, rows: int, columns: int, inner: int, groups: int = 1) -> float:
    """Seconds of one product per expert that run as one kernel, `rows` on average. Routing decides the rows of each
    group, so the last tile of a group is half empty in the mean: each of several groups has half a tile of rows more.
    """
    if groups == 1 or not rate.multiprocessors:
        return matmul_time(rate, rows, columns, inner, groups)
    return matmul_time(rate, rows + GROUP_TILE_ROWS // 2, columns, inner, groups)


def weight_gradient_time(rate: KernelRate, rows: int, columns: int, inner: int, groups: int = 1) -> float:
    """Seconds of the weight gradient of a product of (rows x inner) by (inner x columns). Its operands are the output
    gradients (rows x columns) and the inputs (rows x inner): rows in memory have the length of features, and any number
    of tokens is aligned.
    """
    return matmul_time(rate, columns, inner, rows, groups, transposed=True)


@dataclass(frozen=True)
class LinearTime:
    """Seconds of products of activations with weights."""

    forward: float
    input_gradients: float
    weight_gradients: float

    def __add__(self, other: LinearTime) -> LinearTime:
        return LinearTime(
            self.forward + other.forward,
            self.input_gradients + other.input_gradients,
            self.weight_gradients + other.weight_gradients,
        )


def linear_time(rate: KernelRate, matmuls: list[MatmulShape], cast_seconds: float = 0.0) -> LinearTime:
    """Seconds of these products and of their gradients. `cast_seconds` are those per element that is quantized."""
    elements = sum(count * (m * k + k * n) for m, n, k, count in matmuls)
    gradient_elements = sum(count * (m * n + n * k) for m, n, k, count in matmuls)
    return LinearTime(
        sum(grouped_matmul_time(rate, *matmul) for matmul in matmuls) + cast_seconds * elements,
        sum(grouped_matmul_time(rate, m, k, n, count) for m, n, k, count in matmuls) + cast_seconds * gradient_elements,
        sum(weight_gradient_time(rate, *matmul) for matmul in matmuls),
    )


def factors_time(rate: KernelRate, tokens: int, tensor: int, factors: tuple[LowRankFactors, ...]) -> LinearTime:
    """Seconds of the products with low-rank factors, and of adding their results to those of the weights."""
    times = LinearTime(0.0, 0.0, 0.0)
    for rank, inputs, outputs, dim, count in factors:
        columns, rows = inputs // (tensor if dim == 1 else 1), outputs // (tensor if dim == 0 else 1)
        product = linear_time(rate, [(tokens, rank, columns, 1), (tokens, rows, rank, 1)])
        added = memory_bound_time(rate, 3 * tokens * rows * rate.element_bytes, 2)
        forward, backward = count * (product.forward + added), count * (product.input_gradients + added)
        times += LinearTime(forward, backward, count * product.weight_gradients)
    return times


def memory_bound_time(rate: KernelRate, moved_bytes: float, kernels: float = 1) -> float:
    """Seconds of kernels that read and write this many bytes together."""
    return moved_bytes / rate.bandwidth + kernels * LAUNCH_GAP
