"""The sample order by its definition in docs/stream.md, one position at a time, in Python integers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt

from meshwright.base.config import RunConfig

CYCLE = 10_000
"""Positions after which the shares of a mixture are exact."""
ROUNDS = 8
LEAST_SIDE = 8
WORD = (1 << 64) - 1


@lru_cache(maxsize=4096)
def round_keys(key: str, n: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{key}/{n}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def permute(key: str, n: int, value: int) -> int:
    """The value's place in the permutation of range(n) that a key selects: a Feistel network over range(a) x range(b),
    applied until the result is below n.
    """
    a = max(LEAST_SIDE, isqrt(n - 1) + 1)
    b = max(LEAST_SIDE, (n + a - 1) // a)
    keys = round_keys(key, n)
    while True:
        high, low = value // b, value % b
        for number, round_key in enumerate(keys):
            side = b if number % 2 else a
            high, low = low, (high + scaled_hash(low + round_key, side)) % side
        value = high * b + low
        if value < n:
            return value


def scaled_hash(x: int, side: int) -> int:
    """The upper 31 bits of splitmix64's finalizer, scaled to range(side)."""
    x &= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return (x >> 33) * side >> 31


def quotas(weights: Sequence[float]) -> list[int]:
    """The positions of each source per CYCLE: weights rounded by the largest-remainder method."""
    total = sum(weights)
    exact = [weight / total * CYCLE for weight in weights]
    shares = [int(share) for share in exact]
    while sum(shares) < CYCLE:
        remainders = [share - rounded for share, rounded in zip(exact, shares, strict=True)]
        shares[remainders.index(max(remainders))] += 1
    return shares


@lru_cache(maxsize=32)
def cycle_table(seed: int, shares: tuple[int, ...], cycle: int) -> list[tuple[int, int]]:
    """(source, the number of earlier positions of the cycle with this source) of every position of a cycle."""
    source_of_slot = [source for source, share in enumerate(shares) for _ in range(share)]
    seen, table = [0] * len(shares), []
    for position in range(CYCLE):
        source = source_of_slot[permute(f"{seed}/cycle/{cycle}", CYCLE, position)]
        table.append((source, seen[source]))
        seen[source] += 1
    return table


@dataclass(frozen=True)
class Sampler:
    """The sample order of a run."""

    seed: int
    global_batch: int
    lengths: tuple[int, ...]
    """the number of samples of each source"""
    weights: tuple[float, ...]
    holdout: float

    @classmethod
    def from_config(cls, config: RunConfig, lengths: Sequence[int]) -> Sampler:
        weights = tuple(source.weight for source in config.data.mixture) or (1.0,)
        return cls(config.seed, config.batch.global_, tuple(lengths), weights, config.eval.holdout)

    def step(self, step: int) -> list[int]:
        """The sample ids of a step, in global order."""
        return [self.sample(step * self.global_batch + index) for index in range(self.global_batch)]

    def sample(self, position: int) -> int:
        """The sample id at a position of the stream."""
        source, ordinal = self.place(position)
        trained = self.lengths[source] - self.held_out(source)
        epoch, within = ordinal // trained, ordinal % trained
        shuffled = permute(f"{self.seed}/source/{source}/epoch/{epoch}", trained, within)
        return self.id_of(source, self.held_out(source) + shuffled)

    def evaluated(self, limit: int) -> list[int]:
        """The held-out samples of an evaluation, in the order of sources."""
        places = [self.place(p) for p in range(min(limit, CYCLE * sum(map(self.held_out, range(len(self.lengths))))))]
        return [self.id_of(source, ordinal) for source, ordinal in sorted(places) if ordinal < self.held_out(source)]

    def held_out(self, source: int) -> int:
        """The number of samples of a source that training never reads."""
        return max(1, int(self.lengths[source] * self.holdout)) if self.holdout else 0

    def place(self, position: int) -> tuple[int, int]:
        """(source, the number of earlier positions with this source)."""
        if len(self.lengths) == 1:
            return 0, position
        cycle, within = divmod(position, CYCLE)
        source, ordinal = cycle_table(self.seed, self.shares, cycle)[within]
        return source, cycle * self.shares[source] + ordinal

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The positions of each source per CYCLE."""
        return tuple(quotas(self.weights))

    def id_of(self, source: int, ordinal: int) -> int:
        """The sample id of an ordinal in the split of a source, which has the held-out samples first."""
        if self.held_out(source):
            ordinal = permute(f"{self.seed}/source/{source}/split", self.lengths[source], ordinal)
        return sum(self.lengths[:source]) + ordinal
