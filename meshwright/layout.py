"""Who is where: the axes of the mesh, their order and degrees, and which ranks form which group. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

AXES = ("replicate",)
"""Outermost first: neighbours in rank are neighbours on the last axis, so the chattiest axis comes last."""

DATA_AXES = ("replicate",)
"""The axes along which ranks read different samples."""


@dataclass(frozen=True)
class Layout:
    """A degree for every axis; ranks are numbered in row-major order over AXES."""

    replicate: int = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return prod(self.degrees)

    @property
    def data_degree(self) -> int:
        """How many ways the global batch is split."""
        return prod(getattr(self, axis) for axis in DATA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of {self.ranks}")
        place = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, place[axis] = divmod(rank, degree)
        return place

    def data_coordinate(self, rank: int) -> int:
        """Which slice of the global batch a rank reads."""
        place, index = self.coordinates(rank), 0
        for axis in DATA_AXES:
            index = index * getattr(self, axis) + place[axis]
        return index

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one on the axis alone, in order."""
        here = self.coordinates(rank) | {axis: None}
        return [r for r in range(self.ranks) if self.coordinates(r) | {axis: None} == here]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
