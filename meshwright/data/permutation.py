"""A keyed permutation of range(n) for any n, computed at a point: no table, no memory, no growth.

An unbalanced Feistel network over the bits of n - 1 permutes range(2^k) with 2^(k-1) < n <= 2^k; walking its
cycles until the value falls below n restricts it to range(n), and both directions stay exact (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Fewer than two walks are expected. It shuffles; it hides nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.uint64]

ROUNDS = 8
LARGEST = 1 << 62


@dataclass(frozen=True)
class Permutation:
    """The permutation of range(n) that the key names; the key is any text."""

    n: int
    key: str

    def __post_init__(self) -> None:
        if not 1 <= self.n <= LARGEST:
            raise ValueError(f"a permutation of {self.n} elements; allowed: from 1 to 2^62")

    @cached_property
    def round_keys(self) -> tuple[np.uint64, ...]:
        digest = hashlib.blake2b(f"{self.key}/{self.n}".encode(), digest_size=8 * ROUNDS).digest()
        return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    @cached_property
    def halves(self) -> tuple[int, int]:
        bits = max(6, (self.n - 1).bit_length())  # on fewer bits the rounds cannot reach every order evenly
        return bits // 2, bits - bits // 2

    def __call__(self, positions: Positions) -> Positions:
        return self._walk(positions, self._forward)

    def inverse(self, values: Positions) -> Positions:
        return self._walk(values, self._backward)

    def _walk(self, start: Positions, once: object) -> Positions:
        assert callable(once)
        start = np.atleast_1d(np.asarray(start, dtype=np.uint64))
        if start.size and int(start.max()) >= self.n:
            raise ValueError(f"{int(start.max())} is not below {self.n}")
        out: Positions = once(start)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            moved: Positions = once(out[outside])
            out[outside] = moved
            outside = outside[moved >= self.n]
        return out

    def _forward(self, x: Positions) -> Positions:
        # In round r the high part is mixed by the low part, and the parts change places: their widths alternate.
        left, right = self.halves
        for key in self.round_keys:
            low = x & mask(right)
            high = (x >> np.uint64(right)) ^ (mixed(low, key) & mask(left))
            x = (low << np.uint64(left)) | high
            left, right = right, left
        return x

    def _backward(self, x: Positions) -> Positions:
        left, right = self.halves  # ROUNDS is even, so the widths are again what they were at the start
        for key in reversed(self.round_keys):
            left, right = right, left
            high = x & mask(left)
            low = x >> np.uint64(left)
            x = ((high ^ (mixed(low, key) & mask(left))) << np.uint64(right)) | low
        return x


def mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def mixed(x: Positions, key: np.uint64) -> Positions:
    """The finalizer of splitmix64 over x + key; wrapping multiplication is what it wants."""
    with np.errstate(over="ignore"):
        x = x + key
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
