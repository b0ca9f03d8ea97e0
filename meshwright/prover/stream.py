"""The sample stream's contract, checked on the user's own config and data."""

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

WHOLE_EPOCH = 2_000_000
"""An epoch up to this size is enumerated; of a larger one this many positions are followed there and back."""


def check_stream(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    sources = open_sources(config.data, config.model.vocab, config.model.separator)
    stream = build_stream(config, sources)
    yield union_of_slices(stream)
    yield from each_sample_once(stream)
    yield reshuffled(stream)
    yield held_out_never_trained(stream)
    yield find_inverts_show(stream)
    yield resumed_anywhere(config, ConcatenatedSource(sources), stream)


def telling_steps(stream: Stream) -> list[int]:
    """The first steps, those around the end of the first source's first epoch, and one far away."""
    last = stream.sources[0].trained // stream.global_batch
    return sorted({0, 1, max(0, last - 1), last, last + 1, 10**8})


def degrees(stream: Stream) -> list[int]:
    return [r for r in range(1, min(64, stream.global_batch) + 1) if stream.global_batch % r == 0]


def union_of_slices(stream: Stream) -> tuple[str, bool, str]:
    compared = 0
    for step in telling_steps(stream):
        whole = stream.step(step)
        for replicas in degrees(stream):
            slices = [stream.local_samples(step, rank, replicas) for rank in range(replicas)]
            if not np.array_equal(np.concatenate(slices), whole):
                return (
                    "ranks' slices make up the step",
                    False,
                    f"step {step} on {replicas} ranks: {slices} is not {whole}",
                )
            compared += 1
    return "ranks' slices make up the step", True, f"{compared} steps x layouts, degrees {degrees(stream)}"


def each_sample_once(stream: Stream) -> Iterator[tuple[str, bool, str]]:
    for index, part in enumerate(stream.sources):
        promise = f"source {index}: an epoch holds each sample once"
        ids = first_of_source(stream, index, min(part.trained, WHOLE_EPOCH))
        distinct = len(np.unique(ids))
        yield (
            promise,
            distinct == len(ids) and len(ids) > 0,
            f"{distinct:,} distinct of {len(ids):,} followed, {part.trained:,} in an epoch",
        )


def first_of_source(stream: Stream, index: int, count: int) -> Positions:
    """The first ids that the stream draws from one source: at most count, of what WHOLE_EPOCH positions hold."""
    start = sum(part.samples for part in stream.sources[:index])
    part, found, position = stream.sources[index], np.empty(0, np.uint64), 0
    # A source of three samples has thousands of epochs in a short stretch of the stream: the stretch is bounded too.
    end = min(WHOLE_EPOCH, 5000 * min(part.trained for part in stream.sources)) if len(stream.sources) > 1 else count
    while len(found) < count and position < end:
        ids = stream.sample_ids(np.arange(position, min(end, position + max(1000, count)), dtype=np.uint64))
        found = np.concatenate([found, ids[(ids >= start) & (ids < start + part.samples)]])
        position += len(ids)
    return found[:count]


def reshuffled(stream: Stream) -> tuple[str, bool, str]:
    part = stream.sources[0]
    one = Stream(stream.seed, stream.global_batch, (part,))
    count = min(part.trained, 100_000)
    first = one.sample_ids(np.arange(count, dtype=np.uint64))
    second = one.sample_ids(np.arange(count, dtype=np.uint64) + np.uint64(part.trained))
    same = int((first == second).sum())
    kept = part.trained < 8 or same < count / 2
    return "each epoch has its own order", kept, f"{same:,} of {count:,} places hold the same sample in epochs 0 and 1"


def held_out_never_trained(stream: Stream) -> tuple[str, bool, str]:
    ids = stream.held_out_samples(10_000)
    met = [int(sample) for sample in ids if next(stream.occurrences(int(sample)), None) is not None]
    return (
        "held-out samples are never trained on",
        not met,
        f"{len(ids):,} held-out samples, {len(met)} met by training",
    )


def find_inverts_show(stream: Stream) -> tuple[str, bool, str]:
    checked = 0
    for step in telling_steps(stream):
        for index, sample in enumerate(stream.step(step)[:16].tolist()):
            position = step * stream.global_batch + index
            place = stream.occurrence(sample, stream.epoch_at(position))
            if place is None or place.position != position:
                return "find is the inverse of show", False, f"step {step} shows sample {sample}, find leads to {place}"
            checked += 1
    return "find is the inverse of show", True, f"{checked} samples led back to their step"


def resumed_anywhere(config: RunConfig, source: ConcatenatedSource, stream: Stream) -> tuple[str, bool, str]:
    """What the real loader gives from step k on is what it gave from step 0, on other rank counts and workers too."""
    promise, steps = "resume at any step, other ranks, other workers: same data", 6
    few = min(stream.global_batch, 64)
    small = Stream(stream.seed, few, stream.sources)
    whole = loaded(config, source, small, 1, 0, 0, steps)
    compared = 0
    for replicas in degrees(small)[:3]:
        for workers in (0, 3):
            for first in (0, 1, steps - 1):
                if loaded(config, source, small, replicas, workers, first, steps) != whole[first:]:
                    return (
                        promise,
                        False,
                        f"from step {first} on {replicas} ranks with {workers} workers the loader gave other data",
                    )
                compared += 1
    return promise, True, f"{compared} resumes bitwise equal"


def loaded(
    config: RunConfig, source: ConcatenatedSource, stream: Stream, replicas: int, workers: int, first: int, end: int
) -> list[str]:
    """A digest of each step's tensors, ranks put together in order."""
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
