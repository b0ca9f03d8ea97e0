"""Measures the matmul rate, the memory bandwidth and the launch time of a device while the other ranks do the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meshwright.base.dtypes import COMPUTE_BYTES, TORCH_NAMES
from meshwright.base.hardware.cluster import MatmulRate
from meshwright.core.torch_private import scaled_mm
from meshwright.ops.measure.timing import TimeBudget, TimingGroup, fits_budget

MatmulShape = tuple[int, int, int]
"""m (tokens), k, n of an (m x k) by (k x n) product"""
MATMUL_SHAPES: dict[str, list[MatmulShape]] = {
    "cpu": [(128, 128, 128), (512, 512, 512), (4096, 256, 256), (256, 512, 2048), (1024, 1024, 1024)],
    "cuda": [(1024, 1024, 1024), (4096, 4096, 4096), (16384, 4096, 1024), (2048, 4096, 14336), (8192, 8192, 8192)],
}
"""Small, tall, wide and large products by device type. The smallest is first: it predicts the time of the others."""
TORCH_DTYPES = {precision: getattr(torch, TORCH_NAMES[precision]) for precision in COMPUTE_BYTES}
"""Precision that a run can train in -> dtype of torch."""
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Size of the copied tensor by device type; larger than the caches."""
LAUNCH_ELEMENTS = 64
"""Elements of a tensor so small that the time of an operator is its launch."""


def measure_matmuls(group: TimingGroup, budget: float) -> list[MatmulRate]:
    """Measures matmul rates by precision and shape.

    A product that is too slow for its share of the budget is skipped, except for the smallest of each precision.
    """
    precisions = [*TORCH_DTYPES, *(["fp8"] if supports_fp8(group.device) else [])]
    shapes = MATMUL_SHAPES[group.device.type]
    shares = TimeBudget(group, budget, len(precisions) * len(shapes))
    rates = []
    for precision in precisions:
        best = 0.0
        for m, k, n in shapes:
            flops, share = 2.0 * m * k * n, shares.next_share()
            if best and not fits_budget(flops / best, share):
                continue
            rate = flops / group.median_seconds(prepare_matmul(precision, (m, k, n), group.device), share)
            best = max(best, rate)
            rates.append(MatmulRate(precision, m, k, n, rate))
    return rates


def prepare_matmul(precision: str, shape: MatmulShape, device: torch.device) -> Callable[[], object]:
    """Returns a call of one matmul on random inputs: on zeros a device draws less power and runs faster than usual."""
    m, k, n = shape
    if precision == "fp8":
        left, right = (torch.randn(size, device=device).to(torch.float8_e4m3fn) for size in ((m, k), (n, k)))
        scale = torch.ones((), device=device)
        return partial(scaled_mm, left, right.t(), scale, scale, torch.bfloat16)
    left, right = (torch.randn(size, device=device).to(TORCH_DTYPES[precision]) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=left.dtype, device=device)
    return partial(torch.mm, left, right, out=out)


def supports_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def measure_memory_bandwidth(group: TimingGroup, budget: float) -> float:
    """Returns the bytes/s that a copy reads and writes."""
    size = COPY_BYTES[group.device.type]
    source = torch.ones(size // 4, device=group.device)
    target = torch.zeros_like(source)
    return 2 * size / group.median_seconds(partial(target.copy_, source), budget)


def measure_launch(group: TimingGroup, budget: float) -> float:
    """Returns the seconds from the launch of one operator to the launch of the next."""
    small = torch.zeros(LAUNCH_ELEMENTS, device=group.device)
    return group.median_seconds(partial(torch.add, small, small), budget)
