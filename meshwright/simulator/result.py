"""What a simulation found: bytes sent and held by chosen ranks, and what was gone through to know."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.telemetry.comm_counter import CollectiveTotal


@dataclass(frozen=True)
class RankResult:
    """One rank's step. Bytes are sums over the step."""

    rank: int
    place: dict[str, int]
    """where it stands on every axis in use"""
    blocks: dict[int, int]
    """of each of its stages"""
    traffic: list[CollectiveTotal]
    peak: dict[str, int]
    """the most of each class by itself"""
    at_peak: dict[str, int]
    """the classes when most is held in all"""
    live: dict[int, int]
    """micro-batches whose activations each stage held at once, at most; empty without a pipeline"""
    max_in_flight: int
    """the same over all its stages"""
    multiplied: list[str]
    seconds: float

    @property
    def peak_total(self) -> int:
        return sum(self.at_peak.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"peak_total": self.peak_total}


@dataclass(frozen=True)
class Simulation:
    layout: str
    ranks: int
    batch: str
    parameters: int
    """of the whole model"""
    schedule: str
    """of the pipeline; empty without one"""
    live: list[int]
    """by rank of the pipeline: micro-batches held at once, at most, one for each of its stages"""
    found: list[RankResult]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"found": [rank.to_json() for rank in self.found]}
