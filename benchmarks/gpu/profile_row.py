"""The kernels of one step of Meshwright and of the best plain loop, by the time that each takes on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.meshwright_contender import MeshwrightLoop
from benchmarks.gpu.plain_loops import BestLoop
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import Contender, Entrant, synchronize

SHOWN = 30
"""Kernels that are listed."""


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    return {
        "meshwright": profile_step(shape, device, lambda: MeshwrightLoop(shape, device)),
        "best": profile_step(shape, device, lambda: BestLoop(shape, device)),
    }


def profile_step(shape: Shape, device: torch.device, build: Callable[[], Contender]) -> dict[str, Any]:
    entrant = Entrant.enter(build, device, shape.tokens, shape.flops_per_token)
    turn = entrant.run_turn(shape.steps)
    entrant.state.restore()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        entrant.contender.step()
        synchronize(device)
    kernels = [
        (event.self_device_time_total / 1e3, event.count, event.key)
        for event in profiler.key_averages()
        if str(event.device_type).endswith("CUDA") and event.self_device_time_total
    ]
    entrant.leave()
    return {
        "step_ms": round(turn.seconds * 1e3, 2),
        "kernel_ms": round(sum(time for time, _, _ in kernels), 2),
        "kernels": [f"{time:.3f} ms {count} {key[:100]}" for time, count, key in sorted(kernels, reverse=True)[:SHOWN]],
    }
