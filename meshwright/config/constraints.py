"""What a setting may be: ranges of numbers, and the mark of those that do not change a run's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The values a number may take, both ends included; `above` excludes its end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def allows(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least:,} to {self.most:,}"
        if self.above is not None:
            return f"above {self.above:,}" + (f" and at most {self.most:,}" if self.most is not None else "")
        return f"at least {self.least:,}" if self.least is not None else f"at most {self.most:,}"


class Placement:
    """Marks a field that may differ between two attempts at the same run without changing its numbers."""


PLACEMENT = Placement()
IGNORED = -100
"""The target that counts for nothing, in data and loss alike (torch's own default)."""

LARGEST_BATCH = 1 << 24
"""Samples an optimizer step, at most: their ids are held in memory at once."""
Count = Annotated[int, Range(least=1, most=1 << 31)]
Natural = Annotated[int, Range(least=0, most=1 << 48)]
Positive = Annotated[float, Range(above=0, most=1e12)]
Seconds = Annotated[float, Range(above=0, most=1e6)]
Share = Annotated[float, Range(least=0, most=1)]


def nearest(values: list[int], wanted: int, most: int = 6) -> str:
    """The few values closest to the wanted one, in order, as text."""
    return ", ".join(str(v) for v in sorted(sorted(values, key=lambda v: (abs(v - wanted), v))[:most]))
