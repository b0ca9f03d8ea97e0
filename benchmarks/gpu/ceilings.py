"""The matmul rate that the device reaches, in a burst on a cool card and sustained at its power limit."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.timing import free_memory, synchronize, timed

DATASHEET_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense bfloat16 rates of NVIDIA's datasheets, by a part of the device's name."""


def measure(device: torch.device, seconds: float) -> dict[str, Any]:
    """TFLOP/s of a bfloat16 product of square matrices: the first ten, and those of the last half of `seconds`."""
    size = 8192 if device.type == "cuda" else 128
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = left @ right
    synchronize(device)
    burst = rate(left, right, out, 10)
    begin, sustained = time.perf_counter(), burst
    while time.perf_counter() - begin < seconds:
        sustained = rate(left, right, out, 200)
    del left, right, out
    free_memory(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "matmul_burst_tflops": round(burst, 1),
        "matmul_sustained_tflops": round(sustained, 1),
        "datasheet_tflops": next((value for part, value in DATASHEET_TFLOPS.items() if part in name), None),
        "matmul_size": size,
        "seconds": seconds,
    }


def rate(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, products: int) -> float:
    with timed(left.device) as seconds:
        for _ in range(products):
            torch.mm(left, right, out=out)
    return float(2 * len(left) ** 3 * products / seconds() / 1e12)


def utilization(tflops: float, ceilings: dict[str, Any]) -> dict[str, float]:
    """Model FLOPs utilization relative to each ceiling."""
    keys = {"datasheet": "datasheet_tflops", "burst": "matmul_burst_tflops", "sustained": "matmul_sustained_tflops"}
    return {name: round(tflops / value, 4) for name, key in keys.items() if (value := ceilings.get(key))}
