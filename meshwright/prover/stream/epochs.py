"""Checks that an epoch contains each training sample once in an order of its own, and no held-out sample."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.core.data.permutation import Positions
from meshwright.core.data.stream import Stream
from meshwright.prover.oracle.sampler import CYCLE, Sampler
from meshwright.prover.stream.checked_stream import (
    CheckedStream,
    WrongStream,
    epochs_with_borders,
    first_difference,
    shown,
)

MAX_POSITIONS = 1 << 20
"""Positions that are enumerated in all epochs of all sources together."""
BLOCK = 1 << 14
"""Positions that are enumerated in one call; larger arrays leave the CPU cache."""
PREFIX = 48
"""Positions at the start of an epoch whose order is compared with that of every other epoch."""
MIN_SHUFFLED = 20
"""Epochs with fewer samples have so few orders that two of them may be equal by chance."""
MAX_EVALUATED = 4000
"""Held-out samples that are compared with the reference."""


@dataclass(frozen=True)
class SingleSourceSampler(Sampler):
    """The reference of a stream that reads one source of a mixture only."""

    source: int = 0

    def place(self, position: int) -> tuple[int, int]:
        return self.source, position


def single_source(checked: CheckedStream, source: int) -> tuple[Stream, SingleSourceSampler]:
    """The stream that gives every position to one source, so that its positions are the ordinals of the source."""
    if len(checked.sources) == 1:
        stream = checked.stream
    else:
        shares = enumerate(checked.stream.sources)
        only = tuple(replace(share, quota=CYCLE if index == source else 0) for index, share in shares)
        stream = replace(checked.stream, sources=only)
    sampler = checked.sampler
    values = sampler.seed, sampler.global_batch, sampler.lengths, sampler.weights, sampler.holdout
    return stream, SingleSourceSampler(*values, source)


def check_epochs(checked: CheckedStream) -> str:
    sources = checked.some_sources()
    epochs_compared = enumerated = 0
    for source in sources:
        epochs = compare_epochs(checked, source, limit=96 // len(sources))
        epochs_compared += len(epochs)
        enumerated += enumerate_epochs(checked, source, epochs, MAX_POSITIONS // len(sources))
    return (
        f"{epochs_compared} epochs of {len(sources)} of {len(checked.sources)} source(s) differ pairwise and equal the "
        f"reference; {enumerated:,} positions enumerated"
    )


def compare_epochs(checked: CheckedStream, source: int, limit: int) -> list[int]:
    """Compares the first samples of many epochs with the reference and with each other; returns the epochs."""
    stream, sampler = single_source(checked, source)
    trained, name = checked.trained(source), checked.sources[source].name
    length = min(trained, PREFIX)
    chosen = [0, *epochs_with_borders(checked.random, checked.own_epochs(source), trained)]
    epochs = chosen[: limit // 2] + chosen[limit // 2 :][-limit // 2 :]
    orders: dict[tuple[int, ...], int] = {}
    for epoch in epochs:
        positions = np.arange(epoch * trained, epoch * trained + length, dtype=np.uint64)
        found = tuple(stream.sample_ids(positions).tolist())
        expected = [sampler.sample(position) for position in positions.tolist()]
        if (index := first_difference(expected, found)) is not None:
            where = f"source {name}, epoch {epoch:,}, index {index}"
            raise WrongStream(f"{where}: expected sample {shown(expected, index)}, found {shown(found, index)}")
        if trained >= MIN_SHUFFLED and found in orders:
            raise WrongStream(f"source {name}: epochs {orders[found]:,} and {epoch:,} have the same order")
        if trained >= MIN_SHUFFLED and found == tuple(sorted(found)):
            raise WrongStream(f"source {name}: epoch {epoch:,} is not shuffled")
        orders[found] = epoch
    return epochs


def enumerate_epochs(checked: CheckedStream, source: int, epochs: list[int], budget: int) -> int:
    """Reads whole epochs and compares them with the set of training samples; returns the number of positions. Of an
    epoch that is longer than the budget, random windows are read.
    """
    stream, _ = single_source(checked, source)
    trained, name = checked.trained(source), checked.sources[source].name
    first, end = checked.starts[source], checked.starts[source + 1]
    held_out = held_out_ids(checked, source)
    last = min(checked.own_epochs(source), epochs[-1])
    compared = 0
    for epoch in dict.fromkeys([0, last, *checked.random.sample(epochs, min(2, len(epochs)))]):
        if compared and compared + trained > budget:
            break
        windows = [(epoch * trained, trained)]
        if trained > budget:
            size = budget // 16
            windows = [(epoch * trained + checked.random.randrange(trained - size), size) for _ in range(15)]
            windows.append((epoch * trained + trained - size, size))
        for start, size in windows:
            ids = np.sort(read_positions(stream, start, size).astype(np.int64))
            compared += size
            if repeated := ids[:-1][ids[1:] == ids[:-1]].tolist():
                raise WrongStream(f"source {name}, epoch {epoch:,}: sample {repeated[0]} is read more than once")
            if outside := ids[(ids < first) | (ids >= end)].tolist():
                raise WrongStream(
                    f"source {name}, epoch {epoch:,}: sample {outside[0]} is of another source, expected "
                    f"{first} to {end - 1}"
                )
            if trained_on := held_out[np.isin(held_out, ids)].tolist():
                raise WrongStream(f"source {name}, epoch {epoch:,}: held-out sample {trained_on[0]} is read")
    return compared


def held_out_ids(checked: CheckedStream, source: int) -> NDArray[np.int64]:
    """The held-out samples of a source by the reference, or as many random ones as it may compute."""
    number = checked.sampler.held_out(source)
    ordinals = range(number) if number <= MAX_EVALUATED else checked.random.sample(range(number), MAX_EVALUATED)
    return np.array([checked.sampler.id_of(source, ordinal) for ordinal in ordinals], np.int64)


def read_positions(stream: Stream, start: int, size: int) -> Positions:
    """The sample ids of consecutive positions, read in blocks."""
    blocks = range(start, start + size, BLOCK)
    return np.concatenate(
        [stream.sample_ids(np.arange(b, min(b + BLOCK, start + size), dtype=np.uint64)) for b in blocks]
    )


def check_held_out_samples(checked: CheckedStream) -> str:
    stream, sampler = checked.stream, checked.sampler
    total = sum(sampler.held_out(source) for source in range(len(checked.sources)))
    limit = min(checked.config.eval.samples, MAX_EVALUATED)
    for count in sorted({1, 97, limit, min(total, MAX_EVALUATED)}):
        found, expected = stream.held_out_samples(count).tolist(), sampler.evaluated(count)
        if (index := first_difference(expected, found)) is not None:
            where = f"held-out sample {index} of {count}"
            raise WrongStream(f"{where}: expected {shown(expected, index)}, found {shown(found, index)}")
    held_out = stream.held_out_samples(min(total, MAX_EVALUATED)).tolist()
    for sample in checked.random.sample(held_out, min(len(held_out), 200)):
        if (occurrence := stream.occurrence(sample, checked.random.randrange(4))) is not None:
            raise WrongStream(f"held-out sample {sample} is trained on at step {occurrence.step:,}")
    if len(set(held_out)) < len(held_out):
        raise WrongStream(f"{len(held_out)} held-out samples, only {len(set(held_out))} of them distinct")
    return f"{total:,} samples are held out; {len(held_out):,} equal the reference and are in no epoch"
