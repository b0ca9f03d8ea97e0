"""Declares which values a setting may take, and marks the settings that do not change a run's numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from meshwright.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The values that a number may take. `minimum` and `maximum` are included, `above` is not."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def contains(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"from {self.minimum:,} to {self.maximum:,}"
        if self.above is not None:
            return f"above {self.above:,}" + (f" and at most {self.maximum:,}" if self.maximum is not None else "")
        return f"at least {self.minimum:,}" if self.minimum is not None else f"at most {self.maximum:,}"


class Placement:
    """Marks a setting that may differ between two attempts at the same run without changing its numbers."""


PLACEMENT = Placement()
ENTRY_POINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""MODULE:NAME, both of which may be dotted."""
IGNORE_INDEX = -100
"""Label of a token that is excluded from the loss, in data and loss alike (the default of torch's cross_entropy)."""
PositiveInt = Annotated[int, Range(minimum=1, maximum=1 << 31)]
NonNegativeInt = Annotated[int, Range(minimum=0, maximum=1 << 48)]
PositiveFloat = Annotated[float, Range(above=0, maximum=1e12)]
TimeoutSeconds = Annotated[float, Range(above=0, maximum=1e6)]
UnitFraction = Annotated[float, Range(minimum=0, maximum=1)]


def nearest_values(values: list[int], target: int, count: int = 6) -> str:
    """Lists the `count` values closest to `target`, in ascending order, as text."""
    return ", ".join(str(v) for v in sorted(sorted(values, key=lambda v: (abs(v - target), v))[:count]))


def nearest_multiples(target: int, unit: int) -> str:
    """Lists the multiples of `unit` next below and above `target`, as text."""
    below = target // unit * unit
    return " or ".join(str(v) for v in (below, below + unit) if v > 0)


def parse_step_ranges(text: str, name: str, maximum: int) -> list[range]:
    """Parses ranges of steps such as "10:13,50:52", the end of each excluded; an empty text has none.

    `name` is the setting or option that the text is the value of, and `maximum` the number of steps that it may name.
    """
    ranges: list[range] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([0-9]{1,12}):([0-9]{1,12})\s*", part)
        steps = range(int(match[1]), int(match[2])) if match else range(0)
        if not steps or (ranges and steps.start < ranges[-1].stop):
            raise ConfigError(
                f"{name} = {text[:80]!r} is not a list of step ranges",
                "expected FIRST:END in ascending order, such as 10:13 for steps 10, 11 and 12, or 10:13,50:52",
            )
        ranges.append(steps)
    if (count := sum(map(len, ranges))) > maximum:
        raise ConfigError(f"{name} = {text[:80]!r} names {count:,} steps", f"expected at most {maximum:,}")
    return ranges
