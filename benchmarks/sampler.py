"""What the order of samples costs: a sample at two lengths, its memory, and the way back to a position."""

from __future__ import annotations

import statistics
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from benchmarks import resume
from benchmarks.resume import BATCH, LARGE, SMALL, stream_over, timed
from meshwright.data.permutation import Positions
from meshwright.data.stream import Stream

WORST = 2**39 * 100 // 99 + 2
"""Just more trained samples than a power of two, the length that costs a permutation over bits the most."""
POSITIONS = 4096
BATCHES = 200
MOST_MICROSECONDS, MOST_GROWTH = 0.3, 1.2
"""Targets. What grows with the length is refused; a fifth is left to how far it lies below a power of two."""


def measure() -> dict[str, Any]:
    print("sampler: cost a sample", file=sys.stderr, flush=True)
    own = cost_of_streams({"10^6": SMALL, "10^12": LARGE, "worst length": WORST})
    small, large = own["10^6"], own["10^12"]
    result: dict[str, Any] = {
        "stream": own,
        "growth": {
            "microseconds_a_sample": round(large["microseconds_a_sample"] / small["microseconds_a_sample"], 3),
            "peak_bytes": round(large["peak_bytes"] / small["peak_bytes"], 3),
        },
        "distributed_sampler": cost_of_distributed_sampler(),
    }
    print("sampler: resume", file=sys.stderr, flush=True)
    return result | {"resume": resume.measure()}


def cost_of_streams(lengths: dict[str, int]) -> dict[str, Any]:
    """Lengths take turns, batch by batch, so that all meet the same machine."""
    streams = {name: stream_over(samples) for name, samples in lengths.items()}
    seconds: dict[str, list[float]] = {name: [] for name in lengths}
    for number in range(BATCHES):
        for name, stream in streams.items():
            seconds[name].append(timed(stream.at, positions_of(stream, number)))
    return {
        name: {
            "samples": lengths[name],
            "microseconds_a_sample": round(statistics.median(seconds[name]) / POSITIONS * 1e6, 4),
            "peak_bytes": peak_bytes(stream.at, positions_of(stream, 0)),
        }
        for name, stream in streams.items()
    }


def positions_of(stream: Stream, number: int) -> Positions:
    """The batches follow each other from a hundredth of the first epoch on."""
    start = stream.samples // 100 + number * POSITIONS
    return np.arange(start, start + POSITIONS, dtype=np.uint64)


def cost_of_distributed_sampler() -> dict[str, Any]:
    """Set-up and one whole epoch. Every rank shuffles all samples and keeps its share, so the same work delivers fewer
    with more ranks.
    """

    def epoch(replicas: int) -> None:
        for _ in DistributedSampler(range(SMALL), replicas, 0):  # only the length is asked of it
            pass

    result: dict[str, Any] = {"samples": SMALL}
    for replicas in (1, BATCH.replicas):
        seconds = statistics.median(timed(epoch, replicas) for _ in range(3))
        result[f"microseconds_a_sample, ranks {replicas}"] = round(seconds / (SMALL / replicas) * 1e6, 4)
    tensor = 8  # an int64 of randperm: torch's own memory, which tracemalloc does not see
    listed = 8 + 32  # a pointer in the list it becomes, and the int object that this points to
    result["peak_bytes"] = peak_bytes(epoch, BATCH.replicas) + tensor * SMALL
    terabytes = (tensor + listed) * LARGE / 1e12
    result["at 10^12"] = f"cannot run: ({tensor} + {listed}) bytes x 10^12 = {terabytes:.0f} TB on every rank"
    return result


def peak_bytes(work: Callable[..., Any], *arguments: Any) -> int:
    """The most Python and NumPy memory that the work held at once. Tracing is slow: never while timing."""
    work(*arguments)  # what is made once and kept is not counted
    tracemalloc.start()
    work(*arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
