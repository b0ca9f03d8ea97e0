"""A keyed permutation of range(n) for any n, evaluated at single points in O(1) time and memory.

A Feistel network over pairs (high, low) of range(a) x range(b), with a and b near the square root of n, permutes
range(a * b). Cycle walking, that is applying the network again until the value falls below n, restricts it to range(n),
and both directions stay exact (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). As a * b is just
above n, few values need a second application. The permutation shuffles; it is not cryptographically secure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds. The number is even, so that a and b have their original roles at the end."""
MAX_LENGTH = 1 << 62
"""The largest n."""
MIN_SIDE = 8
"""The smallest a and b: with fewer values per side the rounds do not reach every permutation evenly."""


@dataclass(frozen=True)
class Permutation:
    """The permutation of range(n) that a key selects; the key is any text."""

    n: int
    key: str

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_LENGTH:
            raise ValueError(f"a permutation of {self.n} elements; expected 1 to 2^62")

    @cached_property
    def round_keys(self) -> tuple[np.uint64, ...]:
        digest = hashlib.blake2b(f"{self.key}/{self.n}".encode(), digest_size=8 * ROUNDS).digest()
        return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    @cached_property
    def sides(self) -> tuple[np.uint64, np.uint64]:
        """(a, b) with a * b >= n, both near the square root of n."""
        a = max(MIN_SIDE, isqrt(self.n - 1) + 1)
        return np.uint64(a), np.uint64(max(MIN_SIDE, -(-self.n // a)))

    def __call__(self, positions: Positions) -> Positions:
        return self._cycle_walk(positions, self._forward)

    def inverse(self, values: Positions) -> Positions:
        return self._cycle_walk(values, self._backward)

    def _cycle_walk(self, start: Positions, apply: Callable[[Positions], Positions]) -> Positions:
        start = np.atleast_1d(np.asarray(start, dtype=np.uint64))
        if start.size and int(start.max()) >= self.n:
            raise ValueError(f"position {int(start.max())} is out of range; expected 0 to {self.n - 1}")
        out = apply(start)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            again = apply(out[outside])
            out[outside] = again
            outside = outside[again >= self.n]
        return out

    def _forward(self, x: Positions) -> Positions:
        # Each round adds a keyed hash of the low half to the high half, then swaps the halves.
        a, b = self.sides
        high, low = np.divmod(x, b)
        for key in self.round_keys:
            high, low = low, reduce_modulo(high + keyed_hash(low, key, a), a)
            a, b = b, a
        return high * b + low

    def _backward(self, x: Positions) -> Positions:
        a, b = self.sides
        high, low = np.divmod(x, b)
        for key in reversed(self.round_keys):
            a, b = b, a
            high, low = reduce_modulo(low + (a - keyed_hash(high, key, a)), a), high
        return high * b + low


def reduce_modulo(x: Positions, side: np.uint64) -> Positions:
    """x % side for x below 2 * side, without a division."""
    return x - (x >= side) * side


def keyed_hash(x: Positions, key: np.uint64, side: np.uint64) -> Positions:
    """A number below side (at most 2^31): the finalizer of splitmix64 over x + key. Products overflow on purpose."""
    x = x + key
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(33)
    x *= side
    x >>= np.uint64(31)
    return x
