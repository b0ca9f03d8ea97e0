"""The sample order: which sample is at which position, and the inverse, in O(1) at any position. Torch-free.

Position p of the stream is sample p % global_batch of step p // global_batch, independent of ranks, workers, layout
and restarts. The positions of a source run through one shuffled epoch after another; a batch that crosses the end of
an epoch continues into the next. In a mixture every CYCLE positions contain the exact quota of each source, in a
shuffled order. Sample ids number the samples of all sources consecutively: the first id of the second source follows
the last id of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from meshwright.base.limits import MAX_GLOBAL_BATCH
from meshwright.core.data.permutation import MAX_LENGTH, Permutation, Positions
from meshwright.errors import DataError

CYCLE = 10_000
"""Positions after which the shares of a mixture are exact; a weight is rounded to a multiple of 1 / CYCLE."""


@dataclass(frozen=True)
class SourceShare:
    """The size of one source and its share of the stream."""

    samples: int
    """The number of samples in the source."""
    held_out: int
    """The number of samples that are reserved for evaluation."""
    quota: int
    """The number of positions per CYCLE that belong to the source."""

    @property
    def trained(self) -> int:
        """The number of samples per epoch of training."""
        return self.samples - self.held_out


@dataclass(frozen=True)
class SampleOccurrence:
    """One position at which training reads a sample."""

    epoch: int
    position: int
    step: int
    index: int
    """The index within the global batch of the step."""


@dataclass(frozen=True)
class Stream:
    """The sample order of a run, determined by the seed, the global batch and the sizes of the sources."""

    seed: int
    global_batch: int
    sources: tuple[SourceShare, ...]

    @classmethod
    def from_lengths(
        cls, seed: int, global_batch: int, lengths: Sequence[int], weights: Sequence[float], holdout: float
    ) -> Stream:
        """The stream over sources of these lengths and weights, with a fraction of each held out for evaluation."""
        sources = []
        for index, (samples, quota) in enumerate(zip(lengths, mixture_quotas(weights), strict=True)):
            if samples < 1:
                raise DataError(f"source {index} is empty", "expected at least one sample")
            held_out = max(1, int(samples * holdout)) if holdout else 0
            if held_out >= samples:
                raise DataError(
                    f"source {index} has {samples} sample(s), and eval.holdout = {holdout} leaves none for training",
                    "try more data, a shorter data.sequence, or eval.holdout = 0",
                )
            sources.append(SourceShare(samples, held_out, quota))
        return cls(seed, global_batch, tuple(sources))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Stream:
        """The inverse of `to_json`. The record is untrusted: impossible values raise ValueError."""
        sources = tuple(SourceShare(**share) for share in record["sources"])
        stream = cls(record["seed"], record["global_batch"], sources)
        numbers = [stream.global_batch, *(n for s in sources for n in (s.samples, s.held_out, s.quota))]
        possible = (
            all(type(number) is int and 0 <= number <= MAX_LENGTH for number in numbers)
            and type(stream.seed) is int
            and 0 <= stream.seed < 1 << 63
            and 1 <= stream.global_batch <= MAX_GLOBAL_BATCH
            and 1 <= len(sources) <= CYCLE
            and all(s.held_out < s.samples and s.quota > 0 for s in sources)
            and sum(s.quota for s in sources) == CYCLE
        )
        if not possible:
            raise ValueError("a number in the stream record is out of range")
        return stream

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def samples(self) -> int:
        """The number of samples in all sources, held-out samples included."""
        return sum(share.samples for share in self.sources)

    def step(self, step: int) -> Positions:
        """The sample ids of a step, in global order."""
        return self.sample_ids(self._positions(step * self.global_batch, self.global_batch))

    def local_samples(self, step: int, data_rank: int, data_degree: int) -> Positions:
        """The sample ids that a data-parallel rank reads in a step. Its micro-steps are consecutive slices of them."""
        local_batch = self.global_batch // data_degree
        return self.sample_ids(self._positions(step * self.global_batch + data_rank * local_batch, local_batch))

    def sample_ids(self, positions: Positions) -> Positions:
        """The sample id at each position."""
        source_at, ordinals = self._assign(positions)
        ids = np.empty_like(positions)
        for index in np.unique(source_at).tolist():
            selected = np.flatnonzero(source_at == index)
            shuffled = self._shuffle(index, ordinals[selected]) + np.uint64(self.sources[index].held_out)
            ids[selected] = self._split(index, shuffled) + np.uint64(self._offset(index))
        return ids

    def _shuffle(self, index: int, ordinals: Positions) -> Positions:
        """Map ordinals in the stream of one source to training samples, each epoch by its own permutation."""
        trained = np.uint64(self.sources[index].trained)
        first, last = int(ordinals.min() // trained), int(ordinals.max() // trained)
        if first == last:  # the usual case: all ordinals are in one epoch
            return self._epoch_permutation(index, first)(ordinals - np.uint64(first) * trained)
        epochs, within_epoch = np.divmod(ordinals, trained)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            within_epoch[in_epoch] = self._epoch_permutation(index, int(epoch))(within_epoch[in_epoch])
        return within_epoch

    def held_out_samples(self, limit: int) -> Positions:
        """The first `limit` held-out sample ids, each once, with the sources in their shares of the mixture."""
        limit = min(limit, CYCLE * sum(share.held_out for share in self.sources))
        source_at, ordinals = self._assign(np.arange(limit, dtype=np.uint64))
        ids: list[Positions] = []
        for index, share in enumerate(self.sources):
            selected = ordinals[source_at == index]
            selected = selected[selected < share.held_out]
            ids.append(self._split(index, selected) + np.uint64(self._offset(index)))
        return np.concatenate(ids)

    def locate(self, sample: int) -> tuple[int, int]:
        """(source number, index within the source) of a sample id."""
        if not 0 <= sample < self.samples:
            raise DataError(f"sample {sample} is not in the stream", f"expected 0 to {self.samples - 1}")
        for index, share in enumerate(self.sources):
            if sample < share.samples:
                return index, sample
            sample -= share.samples
        raise AssertionError("unreachable")

    def occurrences(self, sample: int) -> Iterator[SampleOccurrence]:
        """Every occurrence of a sample in training, one per epoch without end; none if the sample is held out."""
        for epoch in count():
            occurrence = self.occurrence(sample, epoch)
            if occurrence is None:
                return
            yield occurrence

    def occurrence(self, sample: int, epoch: int) -> SampleOccurrence | None:
        """The occurrence of a sample in one epoch of its source; None if the sample is held out."""
        index, source_index = self.locate(sample)
        share = self.sources[index]
        split = source_index
        if share.held_out:
            split = int(self._split_permutation(index).inverse(as_positions(source_index))[0])
        if split < share.held_out:
            return None
        within_epoch = self._epoch_permutation(index, epoch).inverse(as_positions(split - share.held_out))
        position = self._position(index, epoch * share.trained + int(within_epoch[0]))
        return SampleOccurrence(epoch, position, position // self.global_batch, position % self.global_batch)

    def epoch_at(self, position: int) -> int:
        """The epoch, counted per source, of the sample at a position."""
        source_at, ordinals = self._assign(as_positions(position))
        return int(ordinals[0]) // self.sources[int(source_at[0])].trained

    def _positions(self, start: int, length: int) -> Positions:
        if not 0 <= start <= MAX_LENGTH:
            raise DataError(f"position {start} is outside of the stream", f"expected 0 to {MAX_LENGTH}")
        return np.arange(start, start + length, dtype=np.uint64)

    def _assign(self, positions: Positions) -> tuple[Positions, Positions]:
        """(source number, ordinal in the stream of that source) of each position."""
        if len(self.sources) == 1:
            return np.zeros_like(positions), positions
        source_at, ordinals = np.empty_like(positions), np.empty_like(positions)
        cycles, within_cycle = np.divmod(positions, np.uint64(CYCLE))
        for cycle in np.unique(cycles):
            in_cycle = cycles == cycle
            slots = cycle_sources(self.seed, tuple(share.quota for share in self.sources), int(cycle))
            source_at[in_cycle] = slots[within_cycle[in_cycle]]
            for index in np.unique(source_at[in_cycle]).tolist():
                preceding = np.cumsum(slots == index, dtype=np.uint64) - np.uint64(1)
                selected = np.flatnonzero(in_cycle & (source_at == index))
                ordinals[selected] = cycle * np.uint64(self.sources[index].quota) + preceding[within_cycle[selected]]
        return source_at, ordinals

    def _position(self, index: int, ordinal: int) -> int:
        """The inverse of `_assign`."""
        if len(self.sources) == 1:
            return ordinal
        cycle, nth = divmod(ordinal, self.sources[index].quota)
        slots = cycle_sources(self.seed, tuple(share.quota for share in self.sources), cycle)
        return cycle * CYCLE + int(np.flatnonzero(slots == index)[nth])

    def _offset(self, index: int) -> int:
        """The first sample id of a source."""
        return sum(share.samples for share in self.sources[:index])

    def _epoch_permutation(self, index: int, epoch: int) -> Permutation:
        return Permutation(self.sources[index].trained, f"{self.seed}/source/{index}/epoch/{epoch}")

    def _split_permutation(self, index: int) -> Permutation:
        return Permutation(self.sources[index].samples, f"{self.seed}/source/{index}/split")

    def _split(self, index: int, ordinals: Positions) -> Positions:
        """Map ordinals to indices of a source, held-out samples first; the identity if none is held out."""
        return self._split_permutation(index)(ordinals) if self.sources[index].held_out and ordinals.size else ordinals


@lru_cache(maxsize=8)
def cycle_sources(seed: int, quotas: tuple[int, ...], cycle: int) -> Positions:
    """The source number at each of the CYCLE positions of one cycle."""
    slots = Permutation(CYCLE, f"{seed}/cycle/{cycle}")(np.arange(CYCLE, dtype=np.uint64))
    ends = np.cumsum(quotas).astype(np.uint64)
    return np.searchsorted(ends, slots, side="right").astype(np.uint64)


def as_positions(value: int) -> Positions:
    return np.array([value], dtype=np.uint64)


def mixture_quotas(weights: Sequence[float]) -> list[int]:
    """Weights as integer shares of CYCLE, by the largest-remainder method."""
    total = sum(weights)
    exact = [weight / total * CYCLE for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))
    for index in by_remainder[: CYCLE - sum(quotas)]:
        quotas[index] += 1
    if 0 in quotas:
        smallest = quotas.index(0)
        raise DataError(
            f"source {smallest} has a share of {weights[smallest] / total:.2g} of the mixture",
            f"expected at least {1 / CYCLE}",
        )
    return quotas
