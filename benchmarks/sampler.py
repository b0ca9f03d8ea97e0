"""The cost of the sample order: time and memory per sample at several lengths, and resuming at a position."""

from __future__ import annotations

import statistics
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from benchmarks import loader_resume
from benchmarks.loader_resume import BATCH, LARGE, SMALL, make_stream, timed
from meshwright.core.data.permutation import Positions
from meshwright.core.data.stream import Stream

WORST_LENGTH = 2**39 * 100 // 99 + 2
"""A length just above a power of two after the holdout: the worst case of a permutation over bits."""
POSITIONS = 4096
BATCHES = 200
MAX_MICROSECONDS, MAX_GROWTH = 0.3, 1.2
"""Targets per sample. The cost must not grow with the length, up to a fifth for the distance to a power of two."""


def measure() -> dict[str, Any]:
    print("sampler: cost per sample", file=sys.stderr, flush=True)
    streams = measure_streams({"10^6": SMALL, "10^12": LARGE, "worst length": WORST_LENGTH})
    small, large = streams["10^6"], streams["10^12"]
    result: dict[str, Any] = {
        "stream": streams,
        "growth": {
            "microseconds_per_sample": round(large["microseconds_per_sample"] / small["microseconds_per_sample"], 3),
            "peak_bytes": round(large["peak_bytes"] / small["peak_bytes"], 3),
        },
        "distributed_sampler": measure_distributed_sampler(),
    }
    print("sampler: resume", file=sys.stderr, flush=True)
    return result | {"resume": loader_resume.measure()}


def measure_streams(lengths: dict[str, int]) -> dict[str, Any]:
    """The lengths alternate batch by batch, so that all see the same load of the machine."""
    streams = {name: make_stream(samples) for name, samples in lengths.items()}
    seconds: dict[str, list[float]] = {name: [] for name in lengths}
    for number in range(BATCHES):
        for name, stream in streams.items():
            seconds[name].append(timed(stream.sample_ids, batch_positions(stream, number)))
    return {
        name: {
            "samples": lengths[name],
            "microseconds_per_sample": round(statistics.median(seconds[name]) / POSITIONS * 1e6, 4),
            "peak_bytes": peak_bytes(stream.sample_ids, batch_positions(stream, 0)),
        }
        for name, stream in streams.items()
    }


def batch_positions(stream: Stream, number: int) -> Positions:
    """Consecutive batches, beginning at one hundredth of the first epoch."""
    start = stream.samples // 100 + number * POSITIONS
    return np.arange(start, start + POSITIONS, dtype=np.uint64)


def measure_distributed_sampler() -> dict[str, Any]:
    """Set-up and one epoch. Every rank shuffles all samples and uses its share, so the cost per sample grows with
    the number of ranks.
    """

    def iterate_epoch(ranks: int) -> None:
        for _ in DistributedSampler(range(SMALL), ranks, 0):  # it needs only the length
            pass

    result: dict[str, Any] = {"samples": SMALL}
    for ranks in (1, BATCH.replicas):
        seconds = statistics.median(timed(iterate_epoch, ranks) for _ in range(3))
        result[f"microseconds_per_sample, ranks {ranks}"] = round(seconds / (SMALL / ranks) * 1e6, 4)
    tensor_bytes = 8  # an int64 of randperm, in torch's memory, which tracemalloc does not trace
    list_bytes = 8 + 32  # a pointer in the list, and the int object that it points to
    result["peak_bytes"] = peak_bytes(iterate_epoch, BATCH.replicas) + tensor_bytes * SMALL
    terabytes = (tensor_bytes + list_bytes) * LARGE / 1e12
    result["at 10^12"] = f"cannot run: ({tensor_bytes} + {list_bytes}) bytes x 10^12 = {terabytes:.0f} TB on every rank"
    return result


def peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The peak memory of Python and NumPy during a call. Tracing is slow, so this is never combined with timing."""
    function(*args)  # caches that are filled once are not counted
    tracemalloc.start()
    function(*args)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
