"""The kernels of one step, by the time that each takes on the device."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.timing import Entrant, GlobalState, synchronize

SHOWN = 30
"""Kernels that are listed."""


def profile_step(entrant: Entrant) -> dict[str, Any]:
    """The sum of the kernels of a step in milliseconds, and the longest ones with the number of their calls."""
    default = GlobalState.capture()
    entrant.state.restore()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        entrant.contender.step()
        synchronize(entrant.device)
    default.restore()
    kernels = [
        (event.self_device_time_total / 1e3, event.count, event.key)
        for event in profiler.key_averages()
        if str(event.device_type).endswith("CUDA") and event.self_device_time_total
    ]
    longest = sorted(kernels, reverse=True)[:SHOWN]
    return {
        "kernel_ms": round(sum(milliseconds for milliseconds, _, _ in kernels), 2),
        "kernels": [f"{milliseconds:.3f} ms {count} {key[:100]}" for milliseconds, count, key in longest],
    }
