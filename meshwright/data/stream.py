"""Which sample stands at which position: a pure function of the seed, in both directions, O(1) at any position.

Position p of the stream is sample p % global of step p // global, whatever the ranks, workers, layout or restarts.
A source's positions run through one shuffled epoch after another; a batch that crosses the end of an epoch simply
goes on into the next. In a mixture every CYCLE positions hold each source's exact quota, in a shuffled order.
Sample ids number all sources' samples in one line: the second source's first id follows the first source's last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from meshwright.config import MAX_GLOBAL_BATCH
from meshwright.data.permutation import MAX_LENGTH, Permutation, Positions
from meshwright.errors import DataError

CYCLE = 10_000
"""Positions after which a mixture's shares are exact; a weight is honoured to one part in this many."""


@dataclass(frozen=True)
class SourceShare:
    """One source's place in the stream."""

    samples: int
    held_out: int
    quota: int

    @property
    def trained(self) -> int:
        return self.samples - self.held_out


@dataclass(frozen=True)
class SampleOccurrence:
    """Where the stream meets a sample."""

    epoch: int
    position: int
    step: int
    index: int  # within the global batch of the step


@dataclass(frozen=True)
class Stream:
    seed: int
    global_batch: int
    sources: tuple[SourceShare, ...]

    @classmethod
    def from_lengths(
        cls, seed: int, global_batch: int, lengths: Sequence[int], weights: Sequence[float], holdout: float
    ) -> Stream:
        """The stream over sources of these lengths and weights, with a share of each held out for evaluation."""
        parts = []
        for index, (samples, quota) in enumerate(zip(lengths, mixture_quotas(weights), strict=True)):
            if samples < 1:
                raise DataError(f"source {index} is empty", "give it at least one sample")
            held_out = max(1, int(samples * holdout)) if holdout else 0
            if held_out >= samples:
                raise DataError(
                    f"source {index} has {samples} sample(s), and eval.holdout = {holdout} leaves none to train on",
                    "give more data, shorter sequences, or eval.holdout = 0",
                )
            parts.append(SourceShare(samples, held_out, quota))
        return cls(seed, global_batch, tuple(parts))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Stream:
        """The inverse of to_json. What a stranger wrote must be a possible stream, or it is a ValueError."""
        parts = tuple(SourceShare(**part) for part in tree["sources"])
        stream = cls(tree["seed"], tree["global_batch"], parts)
        numbers = [stream.global_batch, *(n for p in parts for n in (p.samples, p.held_out, p.quota))]
        possible = (
            all(type(number) is int and 0 <= number <= MAX_LENGTH for number in numbers)
            and type(stream.seed) is int
            and 0 <= stream.seed < 1 << 63
            and 1 <= stream.global_batch <= MAX_GLOBAL_BATCH
            and 1 <= len(parts) <= CYCLE
            and all(p.held_out < p.samples and p.quota > 0 for p in parts)
            and sum(p.quota for p in parts) == CYCLE
        )
        if not possible:
            raise ValueError("no stream has these numbers")
        return stream

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def samples(self) -> int:
        return sum(part.samples for part in self.sources)

    def step(self, step: int) -> Positions:
        """The sample ids of a step, in global order."""
        return self.sample_ids(self._positions(step * self.global_batch, self.global_batch))

    def local_samples(self, step: int, coordinate: int, replicas: int) -> Positions:
        """The ids that one data coordinate of so many reads in a step, in order; its micro-steps are consecutive cuts
        of it.
        """
        local = self.global_batch // replicas
        return self.sample_ids(self._positions(step * self.global_batch + coordinate * local, local))

    def sample_ids(self, positions: Positions) -> Positions:
        """The sample id at each position."""
        which, own = self._assign(positions)
        ids = np.empty_like(positions)
        for index, part in enumerate(self.sources):
            mine = np.flatnonzero(which == index)
            if not mine.size:
                continue
            shuffled = self._shuffled(index, own[mine]) + np.uint64(part.held_out)
            ids[mine] = self._split(index, shuffled) + np.uint64(self._offset(index))
        return ids

    def _shuffled(self, index: int, own: Positions) -> Positions:
        """Ordinals of a source's own stream, each shuffled within its epoch."""
        trained = np.uint64(self.sources[index].trained)
        first, last = int(own.min() // trained), int(own.max() // trained)
        if first == last:  # all of one epoch, as nearly always
            return self._epoch(index, first)(own - np.uint64(first) * trained)
        epoch, within = np.divmod(own, trained)
        for e in np.unique(epoch):
            here = epoch == e
            within[here] = self._epoch(index, int(e))(within[here])
        return within

    def held_out_samples(self, most: int) -> Positions:
        """The first held-out ids, at most so many, each once, the sources in their shares."""
        most = min(most, CYCLE * sum(part.held_out for part in self.sources))
        which, own = self._assign(np.arange(most, dtype=np.uint64))
        ids: list[Positions] = []
        for index, part in enumerate(self.sources):
            ordinals = own[which == index]
            ordinals = ordinals[ordinals < part.held_out]
            ids.append(self._split(index, ordinals) + np.uint64(self._offset(index)))
        return np.concatenate(ids)

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, index within it) of a sample id."""
        if not 0 <= sample < self.samples:
            raise DataError(f"sample {sample} is not in the stream", f"allowed: from 0 to {self.samples - 1}")
        for index, part in enumerate(self.sources):
            if sample < part.samples:
                return index, sample
            sample -= part.samples
        raise AssertionError("unreachable")

    def occurrences(self, sample: int) -> Iterator[SampleOccurrence]:
        """Every place where training meets the sample, epoch after epoch without end; none if it is held out."""
        for epoch in count():
            place = self.occurrence(sample, epoch)
            if place is None:
                return
            yield place

    def occurrence(self, sample: int, epoch: int) -> SampleOccurrence | None:
        """Where training meets the sample in one epoch of its source; None if it is held out."""
        index, within = self.locate(sample)
        part = self.sources[index]
        ordinal = int(self._split_permutation(index).inverse(as_positions(within))[0]) if part.held_out else within
        if ordinal < part.held_out:
            return None
        own = epoch * part.trained + int(self._epoch(index, epoch).inverse(as_positions(ordinal - part.held_out))[0])
        position = self._position(index, own)
        return SampleOccurrence(epoch, position, position // self.global_batch, position % self.global_batch)

    def epoch_at(self, position: int) -> int:
        """Which epoch of its own source the sample at a position belongs to."""
        which, own = self._assign(as_positions(position))
        return int(own[0]) // self.sources[int(which[0])].trained

    def _positions(self, start: int, length: int) -> Positions:
        if not 0 <= start <= MAX_LENGTH:
            raise DataError(f"position {start} is outside the stream", f"allowed: from 0 to {MAX_LENGTH}")
        return np.arange(start, start + length, dtype=np.uint64)

    def _assign(self, positions: Positions) -> tuple[Positions, Positions]:
        """(source, ordinal in that source's own stream) of each position."""
        if len(self.sources) == 1:
            return np.zeros_like(positions), positions
        which, own = np.empty_like(positions), np.empty_like(positions)
        cycle, within = np.divmod(positions, np.uint64(CYCLE))
        for c in np.unique(cycle):
            here = cycle == c
            source = cycle_sources(self.seed, tuple(part.quota for part in self.sources), int(c))
            which[here] = source[within[here]]
            for index, part in enumerate(self.sources):
                before = np.cumsum(source == index, dtype=np.uint64) - np.uint64(1)
                mine = np.flatnonzero(here & (which == index))
                own[mine] = c * np.uint64(part.quota) + before[within[mine]]
        return which, own

    def _position(self, index: int, own: int) -> int:
        """The inverse of _assign."""
        if len(self.sources) == 1:
            return own
        cycle, nth = divmod(own, self.sources[index].quota)
        source = cycle_sources(self.seed, tuple(part.quota for part in self.sources), cycle)
        return cycle * CYCLE + int(np.flatnonzero(source == index)[nth])

    def _offset(self, index: int) -> int:
        return sum(part.samples for part in self.sources[:index])

    def _epoch(self, index: int, epoch: int) -> Permutation:
        return Permutation(self.sources[index].trained, f"{self.seed}/source/{index}/epoch/{epoch}")

    def _split_permutation(self, index: int) -> Permutation:
        return Permutation(self.sources[index].samples, f"{self.seed}/source/{index}/split")

    def _split(self, index: int, ordinals: Positions) -> Positions:
        """Held-out ordinals come first; with nothing held out there is nothing to split."""
        return self._split_permutation(index)(ordinals) if self.sources[index].held_out and ordinals.size else ordinals


@lru_cache(maxsize=8)
def cycle_sources(seed: int, quota: tuple[int, ...], cycle: int) -> Positions:
    """Which source each of the CYCLE positions of one cycle belongs to."""
    slots = Permutation(CYCLE, f"{seed}/cycle/{cycle}")(np.arange(CYCLE, dtype=np.uint64))
    ends = np.cumsum(quota).astype(np.uint64)
    return np.searchsorted(ends, slots, side="right").astype(np.uint64)


def as_positions(value: int) -> Positions:
    return np.array([value], dtype=np.uint64)


def mixture_quotas(weights: Sequence[float]) -> list[int]:
    """Weights as whole shares of CYCLE, by largest remainder."""
    whole = sum(weights)
    exact = [weight / whole * CYCLE for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[: CYCLE - sum(shares)]:
        shares[index] += 1
    if 0 in shares:
        smallest = shares.index(0)
        raise DataError(
            f"source {smallest} has a share of {weights[smallest] / whole:.2g}", f"allowed: at least {1 / CYCLE}"
        )
    return shares
