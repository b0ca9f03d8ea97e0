"""How many rollouts and tokens were generated, trained, dropped by cause, and are in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DROP_CAUSES = ("duplicate", "stale", "lost_timeline", "no_signal", "failed", "damaged")
"""Why a rollout in the log is never trained. damaged: its record was in flight, and can no longer be read."""

MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class Amount:
    """A number of rollouts and of their generated tokens."""

    rollouts: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.rollouts + other.rollouts, self.tokens + other.tokens)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.rollouts - other.rollouts, self.tokens - other.tokens)

    def to_json(self) -> list[int]:
        return [self.rollouts, self.tokens]

    @classmethod
    def from_json(cls, value: Any) -> Amount:
        """Raises ValueError for a value that no run writes."""
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(n) is int and 0 <= n < MAX_COUNT for n in value)
        ):
            raise ValueError("an amount is not [rollouts, tokens]")
        return cls(*value)


def no_drops() -> dict[str, Amount]:
    return dict.fromkeys(DROP_CAUSES, Amount())


@dataclass(frozen=True)
class RolloutCounts:
    """Every rollout in the log up to a position is trained, dropped or in flight, and in only one of these."""

    generated: Amount = Amount()
    trained: Amount = Amount()
    in_flight: Amount = Amount()
    dropped: Mapping[str, Amount] = field(default_factory=no_drops)
    """cause -> amount, for every cause"""

    @property
    def conserved(self) -> bool:
        return self.generated == sum(self.dropped.values(), self.trained + self.in_flight)

    def generate(self, amount: Amount) -> RolloutCounts:
        """The counts after a record that is in flight, until it is judged."""
        return replace(self, generated=self.generated + amount, in_flight=self.in_flight + amount)

    def train(self, amount: Amount) -> RolloutCounts:
        return replace(self, trained=self.trained + amount, in_flight=self.in_flight - amount)

    def drop(self, cause: str, amount: Amount) -> RolloutCounts:
        dropped = {**self.dropped, cause: self.dropped[cause] + amount}
        return replace(self, dropped=dropped, in_flight=self.in_flight - amount)

    def to_json(self) -> dict[str, Any]:
        return {
            "generated": self.generated.to_json(),
            "trained": self.trained.to_json(),
            "in_flight": self.in_flight.to_json(),
            "dropped": {cause: amount.to_json() for cause, amount in self.dropped.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> RolloutCounts:
        """Raises ValueError for a value that no run writes, for example counts that do not add up."""
        if not isinstance(value, dict) or set(value) != {"generated", "trained", "in_flight", "dropped"}:
            raise ValueError("the counts of rollouts are not a record of generated, trained, in_flight and dropped")
        dropped = value["dropped"]
        if not isinstance(dropped, dict) or set(dropped) != set(DROP_CAUSES):
            raise ValueError("the dropped rollouts are not counted by cause")
        generated, trained, in_flight = (
            Amount.from_json(value[name]) for name in ("generated", "trained", "in_flight")
        )
        by_cause = {cause: Amount.from_json(dropped[cause]) for cause in DROP_CAUSES}
        counts = cls(generated, trained, in_flight, by_cause)
        if not counts.conserved:
            raise ValueError("the rollouts that are trained, dropped and in flight are not those that were generated")
        return counts
