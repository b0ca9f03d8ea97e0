"""Draws that are a pure function of their seed, on every machine and in every version of Python. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")

DRAW_BYTES = 128
"""Random bytes of one prompt. The choices of a prompt multiply to less than 2**200, so the bias of taking remainders is
below 2**-800.
"""


class Draws:
    """Uniform draws from one large random integer, which SHAKE-256 makes of a text."""

    def __init__(self, seed: str) -> None:
        self.left = int.from_bytes(hashlib.shake_256(seed.encode()).digest(DRAW_BYTES), "little")

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        self.left, value = divmod(self.left, high - low + 1)
        return low + value

    def choice(self, values: Sequence[Value]) -> Value:
        return values[self.integer(0, len(values) - 1)]

    def text(self, characters: str, low: int, high: int) -> str:
        """A text of low to high of these characters."""
        return "".join(self.choice(characters) for _ in range(self.integer(low, high)))

    def shuffled(self, values: Sequence[Value]) -> list[Value]:
        """The values in a random order (Fisher and Yates)."""
        order = list(values)
        for last in range(len(order) - 1, 0, -1):
            other = self.integer(0, last)
            order[last], order[other] = order[other], order[last]
        return order
