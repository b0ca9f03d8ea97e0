"""What one device computes and moves while its neighbours do the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meshwright.config.dtypes import COMPUTE_BYTES, TORCH_NAMES
from meshwright.measure.timing import TimeBudget, TimingGroup, fits_budget
from meshwright.planner.hardware.cluster import MatmulRate

Shape = tuple[int, int, int]
"""Rows (tokens), inner, columns."""
MATMUL_SHAPES: dict[str, list[Shape]] = {
    "cpu": [(128, 128, 128), (512, 512, 512), (4096, 256, 256), (256, 512, 2048), (1024, 1024, 1024)],
    "cuda": [(1024, 1024, 1024), (4096, 4096, 4096), (16384, 4096, 1024), (2048, 4096, 14336), (8192, 8192, 8192)],
}
"""Small, tall, wide and large ones; the smallest first, of which the others' time is foreseen."""
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes; more than caches hold."""
TINY = 64
"""Numbers of an operator that has nothing to compute."""


def measure_matmuls(crew: TimingGroup, budget: float) -> list[MatmulRate]:
    """Rates by precision and shape. What is too slow for its share of the time is left out, but for the smallest."""
    found = []
    precisions = [*COMPUTE_BYTES, *(["fp8"] if has_fp8(crew.device) else [])]
    shapes = MATMUL_SHAPES[crew.device.type]
    allowance = TimeBudget(crew, budget, len(precisions) * len(shapes))
    for precision in precisions:
        best = 0.0
        for rows, inner, columns in shapes:
            work, share = 2.0 * rows * inner * columns, allowance.next_share()
            if best and not fits_budget(work / best, share):
                continue
            call = product(precision, (rows, inner, columns), crew.device)
            rate = work / crew.median_seconds(call, share)
            best = max(best, rate)
            found.append(MatmulRate(precision, rows, inner, columns, rate))
    return found


def product(precision: str, shape: Shape, device: torch.device) -> Callable[[], object]:
    """Of random numbers: a device draws less power for zeros, and then runs faster than it will."""
    rows, inner, columns = shape
    if precision == "fp8":
        left, right = (
            torch.randn(size, device=device).to(torch.float8_e4m3fn) for size in ((rows, inner), (columns, inner))
        )
        one = torch.ones((), device=device)
        return partial(torch._scaled_mm, left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    left, right = (
        torch.randn(size, device=device).to(getattr(torch, TORCH_NAMES[precision]))
        for size in ((rows, inner), (inner, columns))
    )
    out = torch.empty(rows, columns, dtype=left.dtype, device=device)
    return partial(torch.mm, left, right, out=out)


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def measure_memory_bandwidth(crew: TimingGroup, budget: float) -> float:
    """Bytes a second that are read and written."""
    size = COPIED[crew.device.type]
    source = torch.ones(size // 4, device=crew.device)
    target = torch.zeros_like(source)
    return 2 * size / crew.median_seconds(partial(target.copy_, source), budget)


def measure_launch(crew: TimingGroup, budget: float) -> float:
    """Of one operator from its call to the next."""
    small = torch.zeros(TINY, device=crew.device)
    return crew.median_seconds(partial(torch.add, small, small), budget)
