"""The time from nothing to the first batch at a position: Meshwright's loader beside torchdata's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.ordinary import Samples
from meshwright.config import Batch, RunConfig
from meshwright.data.loader import Loader
from meshwright.data.source import ConcatenatedSource, SyntheticSource
from meshwright.data.stream import Stream

SMALL, LARGE = 10**6, 10**12
STEPS = (0, 10**8)
SAMPLES = (20_000, 100_000)
BATCH = Batch(global_=16, micro=8, replicas=2, accumulation=1)
SEQUENCE, VOCAB = 128, 256


def measure() -> dict[str, Any]:
    return {"loader": own()} | torchdata()


def own() -> dict[str, Any]:
    """Over 10^12 samples, with the default workers."""

    def first(step: int) -> None:
        source = ConcatenatedSource([SyntheticSource(LARGE, SEQUENCE, VOCAB)])
        batches = Loader(source, stream_over(LARGE), BATCH, 0, RunConfig().data).steps(step, 2 * STEPS[-1])
        next(batches)

    seconds = {step: median_of(first, step) for step in STEPS}
    return {
        "samples": LARGE,
        "seconds_at_step": {str(step): round(value, 6) for step, value in seconds.items()},
        "growth": round(seconds[STEPS[-1]] / seconds[STEPS[0]], 3),
    }


def torchdata() -> dict[str, Any]:
    """Over 10^6 samples, with no workers: as a rank of two uses it, and with its own shuffle on one process."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
    except ImportError as error:
        return {"stateful_data_loader": None, "missing": str(error)}
    samples = Samples(SyntheticSource(SMALL, SEQUENCE, VOCAB))

    def distributed() -> Any:
        return StatefulDataLoader(
            samples, BATCH.micro, sampler=StatefulDistributedSampler(samples, BATCH.replicas, 0), num_workers=0
        )

    def shuffled() -> Any:
        return StatefulDataLoader(samples, BATCH.micro, shuffle=True, num_workers=0)

    return {
        "stateful_data_loader": resumed(distributed),
        "stateful_data_loader, shuffle=True": resumed(shuffled),
    }


def resumed(fresh: Callable[[], Any]) -> dict[str, Any]:
    loader = fresh()
    states: dict[int, Any] = {}
    for count, _ in enumerate(loader, 1):
        if count * BATCH.micro in SAMPLES:
            states[count * BATCH.micro] = loader.state_dict()
        if count * BATCH.micro >= SAMPLES[-1]:
            break

    def first(state: Any) -> None:
        loader = fresh()
        loader.load_state_dict(state)
        next(iter(loader))

    seconds = {position: median_of(first, state) for position, state in states.items()}
    near, far = SAMPLES
    return {
        "samples": SMALL,
        "seconds_at_sample": {str(position): round(value, 6) for position, value in seconds.items()},
        "growth": round(seconds[far] / seconds[near], 3),
        "microseconds_a_sample_passed_over": round((seconds[far] - seconds[near]) / (far - near) * 1e6, 4),
    }


def stream_over(samples: int) -> Stream:
    """One source of so many samples, with the default share of it held out."""
    config = RunConfig()
    return Stream.from_lengths(config.seed, BATCH.global_, [samples], [1.0], config.eval.holdout)


def median_of(work: Callable[..., Any], *arguments: Any) -> float:
    return statistics.median(timed(work, *arguments) for _ in range(9))


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start
