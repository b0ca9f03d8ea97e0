"""The result of a simulation: communication volume and memory of the simulated ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.core.telemetry.comm_counter import CollectiveTotal


@dataclass(frozen=True)
class RankResult:
    """One simulated step of one rank. Bytes are totals of the step."""

    rank: int
    coordinates: dict[str, int]
    """the rank's coordinate on every axis in use"""
    blocks: dict[int, int]
    """the number of blocks of each of the rank's pipeline stages"""
    communication: list[CollectiveTotal]
    peak: dict[str, int]
    """the peak of each memory class on its own"""
    at_peak: dict[str, int]
    """the memory classes when the total is largest"""
    in_flight: dict[int, int]
    """by stage, the peak number of micro-batches whose activations are in memory; empty without a pipeline"""
    max_in_flight: int
    """the same peak over all stages of the rank together"""
    extrapolated: list[str]
    """the counts that were simulated and extrapolated, one line each; empty if all blocks and micro-steps ran"""
    seconds: float

    @property
    def peak_total(self) -> int:
        return sum(self.at_peak.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"peak_total": self.peak_total}


@dataclass(frozen=True)
class Simulation:
    """The simulated ranks of one layout."""

    layout: str
    ranks: int
    batch: str
    parameters: int
    """the number of parameters of the full model"""
    schedule: str
    """the pipeline schedule; empty without a pipeline"""
    in_flight: list[int]
    """by pipeline rank, the peak number of micro-batches in flight over all its stages"""
    results: list[RankResult]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"results": [result.to_json() for result in self.results]}
