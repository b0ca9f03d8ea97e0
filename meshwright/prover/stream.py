"""Checks the contract of the sample stream on the user's own config and data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.config import Batch, BatchConfig, RunConfig, derive_batch
from meshwright.data.file_sources import open_sources
from meshwright.data.loader import Loader
from meshwright.data.permutation import Positions
from meshwright.data.sample_lookup import build_stream
from meshwright.data.source import ConcatenatedSource
from meshwright.data.stream import Stream

MAX_POSITIONS = 2_000_000
"""An epoch up to this size is enumerated; of a larger epoch, this many positions are checked."""


def check_stream(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """Every sample's position is a pure function of the seed: no rank count, worker or restart changes it."""
    sources = open_sources(config.data, config.model.vocab, config.model.separator)
    stream = build_stream(config, sources)
    yield check_rank_slices(stream)
    yield from check_epochs(stream)
    yield check_reshuffling(stream)
    yield check_held_out_samples(stream)
    yield check_find_inverts_show(stream)
    yield check_resume(config, ConcatenatedSource(sources), stream)


def checked_steps(stream: Stream) -> list[int]:
    """The first steps, the steps around the end of the first epoch, and one far away."""
    last = stream.sources[0].trained // stream.global_batch
    return sorted({0, 1, max(0, last - 1), last, last + 1, 10**8})


def degrees(stream: Stream) -> list[int]:
    """The data-parallel degrees that divide the global batch."""
    return [r for r in range(1, min(64, stream.global_batch) + 1) if stream.global_batch % r == 0]


def check_rank_slices(stream: Stream) -> tuple[str, bool, str]:
    compared = 0
    for step in checked_steps(stream):
        global_batch = stream.step(step)
        for replicas in degrees(stream):
            slices = [stream.local_samples(step, rank, replicas) for rank in range(replicas)]
            if not np.array_equal(np.concatenate(slices), global_batch):
                return (
                    "the slices of the ranks make up the global batch of a step",
                    False,
                    f"step {step} on {replicas} ranks: {slices} is not {global_batch}",
                )
            compared += 1
    return (
        "the slices of the ranks make up the global batch of a step",
        True,
        f"{compared} combinations of steps and data-parallel degrees {degrees(stream)}",
    )


def check_epochs(stream: Stream) -> Iterator[tuple[str, bool, str]]:
    for index, part in enumerate(stream.sources):
        claim = f"source {index}: an epoch contains each sample once"
        ids = first_of_source(stream, index, min(part.trained, MAX_POSITIONS))
        distinct = len(np.unique(ids))
        yield (
            claim,
            distinct == len(ids) and len(ids) > 0,
            f"{distinct:,} distinct of {len(ids):,} checked; an epoch has {part.trained:,} samples",
        )


def first_of_source(stream: Stream, index: int, count: int) -> Positions:
    """The first ids that the stream draws from one source: at most `count`, within MAX_POSITIONS positions."""
    start = sum(part.samples for part in stream.sources[:index])
    part, drawn, position = stream.sources[index], np.empty(0, np.uint64), 0
    # A source of three samples has thousands of epochs within few positions, so the positions are bounded too.
    end = min(MAX_POSITIONS, 5000 * min(part.trained for part in stream.sources)) if len(stream.sources) > 1 else count
    while len(drawn) < count and position < end:
        ids = stream.sample_ids(np.arange(position, min(end, position + max(1000, count)), dtype=np.uint64))
        drawn = np.concatenate([drawn, ids[(ids >= start) & (ids < start + part.samples)]])
        position += len(ids)
    return drawn[:count]


def check_reshuffling(stream: Stream) -> tuple[str, bool, str]:
    part = stream.sources[0]
    single = Stream(stream.seed, stream.global_batch, (part,))
    count = min(part.trained, 100_000)
    first = single.sample_ids(np.arange(count, dtype=np.uint64))
    second = single.sample_ids(np.arange(count, dtype=np.uint64) + np.uint64(part.trained))
    same = int((first == second).sum())
    passed = part.trained < 8 or same < count / 2
    measured = f"{same:,} of {count:,} positions have the same sample in epochs 0 and 1"
    return "each epoch has its own order", passed, measured


def check_held_out_samples(stream: Stream) -> tuple[str, bool, str]:
    ids = stream.held_out_samples(10_000)
    trained = [int(sample) for sample in ids if next(stream.occurrences(int(sample)), None) is not None]
    return (
        "held-out samples are never trained on",
        not trained,
        f"{len(ids):,} held-out samples, {len(trained)} of them in the training stream",
    )


def check_find_inverts_show(stream: Stream) -> tuple[str, bool, str]:
    claim, checked = "`data find` is the inverse of `data show`", 0
    for step in checked_steps(stream):
        for index, sample in enumerate(stream.step(step)[:16].tolist()):
            position = step * stream.global_batch + index
            occurrence = stream.occurrence(sample, stream.epoch_at(position))
            if occurrence is None or occurrence.position != position:
                return claim, False, f"`show` gives sample {sample} for step {step}, but `find` gives {occurrence}"
            checked += 1
    return claim, True, f"`find` returned the right step for {checked} samples"


def check_resume(config: RunConfig, source: ConcatenatedSource, stream: Stream) -> tuple[str, bool, str]:
    """The real loader, started at step k, returns what it returns from step 0 on, with any ranks and workers."""
    claim, steps = "a resume at any step, with any number of ranks and workers, loads the same data", 6
    small = Stream(stream.seed, min(stream.global_batch, 64), stream.sources)
    expected = load_digests(config, source, small, 1, 0, 0, steps)
    compared = 0
    for replicas in degrees(small)[:3]:
        for workers in (0, 3):
            for first in (0, 1, steps - 1):
                if load_digests(config, source, small, replicas, workers, first, steps) != expected[first:]:
                    return (
                        claim,
                        False,
                        f"from step {first} on {replicas} ranks with {workers} workers the data differs",
                    )
                compared += 1
    return claim, True, f"{compared} resumes load bitwise the same data"


def load_digests(
    config: RunConfig, source: ConcatenatedSource, stream: Stream, replicas: int, workers: int, first: int, end: int
) -> list[str]:
    """A digest per step of the tensors of all ranks, in the order of the ranks."""
    batch: Batch = derive_batch(BatchConfig(stream.global_batch, None), replicas)
    data = replace(config.data, workers=workers, worker_kind="thread", on_bad_sample="stop")
    streams = [Loader(source, stream, batch, rank, data).steps(first, end) for rank in range(replicas)]
    digests = []
    for ranks in zip(*streams, strict=True):
        digest = hashlib.sha256()
        for column in range(max(len(micro.tensors) for micros in ranks for micro in micros)):
            for micros in ranks:
                for micro in micros:
                    digest.update(
                        micro.tensors[column].numpy().tobytes() if micro.tensors else repr(micro.bad_samples).encode()
                    )
        digests.append(digest.hexdigest())
    return digests
