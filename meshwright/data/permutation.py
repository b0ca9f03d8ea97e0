"""A keyed permutation of range(n) for any n, computed at a point: no table, no memory, no growth.

A Feistel network over pairs (high, low) of range(a) x range(b), with a and b near the square root of n, permutes
range(a * b); walking its cycles until the value falls below n restricts it to range(n), and both directions stay exact
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). As a * b is just above n, hardly anything walks.
It shuffles; it hides nothing.
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
MAX_LENGTH = 1 << 62
MIN_SIDE = 8
"""On fewer values a side the rounds cannot reach every order evenly."""


@dataclass(frozen=True)
class Permutation:
    """The permutation of range(n) that the key names; the key is any text."""

    n: int
    key: str

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_LENGTH:
            raise ValueError(f"a permutation of {self.n} elements; allowed: from 1 to 2^62")

    @cached_property
    def round_keys(self) -> tuple[np.uint64, ...]:
        digest = hashlib.blake2b(f"{self.key}/{self.n}".encode(), digest_size=8 * ROUNDS).digest()
        return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    @cached_property
    def sides(self) -> tuple[np.uint64, np.uint64]:
        """(a, b) with a * b >= n, both near its square root."""
        a = max(MIN_SIDE, isqrt(self.n - 1) + 1)
        return np.uint64(a), np.uint64(max(MIN_SIDE, -(-self.n // a)))

    def __call__(self, positions: Positions) -> Positions:
        return self._walk(positions, self._forward)

    def inverse(self, values: Positions) -> Positions:
        return self._walk(values, self._backward)

    def _walk(self, start: Positions, once: Callable[[Positions], Positions]) -> Positions:
        start = np.atleast_1d(np.asarray(start, dtype=np.uint64))
        if start.size and int(start.max()) >= self.n:
            raise ValueError(f"{int(start.max())} is not below {self.n}")
        out = once(start)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            moved = once(out[outside])
            out[outside] = moved
            outside = outside[moved >= self.n]
        return out

    def _forward(self, x: Positions) -> Positions:
        # Each round the low part moves the high one and they change places. ROUNDS is even: a and b end as they began.
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
    """A number below side (at most 2^31), from the finalizer of splitmix64 over x + key; products wrap on purpose."""
    x = x + key
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(33)
    x *= side
    x >>= np.uint64(31)
    return x
