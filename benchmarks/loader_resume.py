"""The time from a new loader to its first batch at a position: Meshwright and torchdata's StatefulDataLoader."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peer_components import SampleDataset
from meshwright.base.config import Batch, RunConfig
from meshwright.core.data.loader import Loader
from meshwright.core.data.source import ConcatenatedSource, SyntheticSource
from meshwright.core.data.stream import Stream

SMALL, LARGE = 10**6, 10**12
STEPS = (0, 10**8)
RESUME_AT = (20_000, 100_000)
"""Positions, in samples, at which torchdata's loader resumes."""
BATCH = Batch(global_=16, micro=8, replicas=2, accumulation=1)
SEQUENCE, VOCAB = 128, 256


def measure() -> dict[str, Any]:
    return {"loader": measure_meshwright()} | measure_torchdata()


def measure_meshwright() -> dict[str, Any]:
    """Over 10^12 samples, with the default number of workers."""

    def load_first(step: int) -> None:
        source = ConcatenatedSource([SyntheticSource(LARGE, SEQUENCE, VOCAB)])
        batches = Loader(source, make_stream(LARGE), BATCH, 0, RunConfig().data).steps(step, 2 * STEPS[-1])
        next(batches)

    seconds = {step: median_of(load_first, step) for step in STEPS}
    return {
        "samples": LARGE,
        "seconds_at_step": {str(step): round(value, 6) for step, value in seconds.items()},
        "growth": round(seconds[STEPS[-1]] / seconds[STEPS[0]], 3),
    }


def measure_torchdata() -> dict[str, Any]:
    """Over 10^6 samples without workers: on one of two ranks, and with shuffle=True in one process."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
    except ImportError as error:
        return {"stateful_data_loader": None, "missing": str(error)}
    samples = SampleDataset(SyntheticSource(SMALL, SEQUENCE, VOCAB))

    def distributed() -> Any:
        return StatefulDataLoader(
            samples, BATCH.micro, sampler=StatefulDistributedSampler(samples, BATCH.replicas, 0), num_workers=0
        )

    def shuffled() -> Any:
        return StatefulDataLoader(samples, BATCH.micro, shuffle=True, num_workers=0)

    return {
        "stateful_data_loader": measure_resume(distributed),
        "stateful_data_loader, shuffle=True": measure_resume(shuffled),
    }


def measure_resume(make_loader: Callable[[], Any]) -> dict[str, Any]:
    loader = make_loader()
    states: dict[int, Any] = {}
    for count, _ in enumerate(loader, 1):
        if count * BATCH.micro in RESUME_AT:
            states[count * BATCH.micro] = loader.state_dict()
        if count * BATCH.micro >= RESUME_AT[-1]:
            break

    def load_first(state: Any) -> None:
        loader = make_loader()
        loader.load_state_dict(state)
        next(iter(loader))

    seconds = {position: median_of(load_first, state) for position, state in states.items()}
    near, far = RESUME_AT
    return {
        "samples": SMALL,
        "seconds_at_sample": {str(position): round(value, 6) for position, value in seconds.items()},
        "growth": round(seconds[far] / seconds[near], 3),
        "microseconds_per_skipped_sample": round((seconds[far] - seconds[near]) / (far - near) * 1e6, 4),
    }


def make_stream(samples: int) -> Stream:
    """A stream over one source, with the default holdout."""
    config = RunConfig()
    return Stream.from_lengths(config.seed, BATCH.global_, [samples], [1.0], config.eval.holdout)


def median_of(function: Callable[..., Any], *args: Any) -> float:
    return statistics.median(timed(function, *args) for _ in range(9))


def timed(function: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start
