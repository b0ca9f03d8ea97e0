"""Who is where: the axes of the mesh, their order and degrees, which ranks form which group, and what is refused.

Torch-free: everything that speaks of ranks asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

from meshwright.config import Batch, LayoutConfig, RunConfig, batch_algebra
from meshwright.config.kinds import nearest
from meshwright.errors import ConfigError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outermost first: neighbours in rank are neighbours on the last axis, so the chattiest axis has the fastest links."""

DATA_AXES = ("replicate", "shard")
"""The axes along which ranks read different samples."""


@dataclass(frozen=True)
class Layout:
    """A degree for every axis; ranks are numbered in row-major order over AXES. `expert` has no ranks of its own: it
    folds over the innermost data ranks.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, config: LayoutConfig) -> Layout:
        """Sharding without a degree of its own divides the replicas, and makes no copies."""
        if config.shard == "none" or config.shard_degree is not None:
            return cls(replicate=config.replicate, shard=config.shard_degree or 1, tensor=config.tensor)
        return cls(shard=config.replicate, tensor=config.tensor)

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

    @property
    def used(self) -> tuple[str, ...]:
        """The axes that more than one rank stands on."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

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

    def reader(self, data_coordinate: int) -> int:
        """The first of the ranks that read a slice of the global batch."""
        rank = 0
        for axis in reversed(DATA_AXES):
            data_coordinate, place = divmod(data_coordinate, getattr(self, axis))
            rank += place * self.stride(axis)
        return rank

    def stride(self, axis: str) -> int:
        """How far apart in rank neighbours on an axis are."""
        return prod(self.degrees[AXES.index(axis) + 1 :])

    def speaks(self, rank: int) -> bool:
        """Whether a rank is the one of those that compute the same loss whose loss and tokens count."""
        return self.first(rank, (axis for axis in AXES if axis not in DATA_AXES))

    def first(self, rank: int, axes: Iterable[str]) -> bool:
        """Whether a rank stands at the beginning of all these axes: the one of its likes that counts."""
        place = self.coordinates(rank)
        return all(place[axis] == 0 for axis in axes)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from this one on these axes alone, in order."""
        if axes == ("expert",):
            return self._expert_group(rank)
        place = self.coordinates(rank)
        members = [rank - sum(place[axis] * self.stride(axis) for axis in axes)]
        for axis in axes:
            steps = range(0, getattr(self, axis) * self.stride(axis), self.stride(axis))
            members = [member + step for member in members for step in steps]
        return sorted(members)

    def groups(self, axis: str) -> Iterator[list[int]]:
        """Every group of an axis, in the order of their first ranks."""
        return (self.group(rank, axis) for rank in range(self.ranks) if self.first(rank, [axis]))

    def _expert_group(self, rank: int) -> list[int]:
        """Experts are spread over so many neighbours among the ranks that read different samples."""
        peers = self.group(rank, *DATA_AXES)
        start = peers.index(rank) // self.expert * self.expert
        return peers[start : start + self.expert]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in self.used) or "replicate 1"


@dataclass(frozen=True)
class Refused:
    """A combination that is not possible, or not right, and why."""

    what: str
    why: str
    applies: Callable[[Layout, RunConfig], str]
    """'' where it does not, else what would be possible instead"""


def _divides(number: Callable[[RunConfig], int]) -> Callable[[Layout, RunConfig], str]:
    def applies(layout: Layout, config: RunConfig) -> str:
        whole = number(config)
        if whole % layout.tensor == 0:
            return ""
        fits = [n for n in range(1, min(whole, 4 * layout.tensor, 4096) + 1) if whole % n == 0]
        return f"layout.tensor = {nearest(fits, layout.tensor)} (it must divide {whole})"

    return applies


def _spread(layout: Layout) -> bool:
    """Whether something beyond whole copies by DDP is asked for."""
    return bool(set(layout.used) - {"replicate"})


REFUSED = (
    Refused(
        "tensor does not divide model.kv_heads",
        "each rank attends with whole heads, keys and values included",
        _divides(lambda config: config.model.kv_heads),
    ),
    Refused(
        "tensor does not divide model.ffn",
        "each rank holds an equal part of the feed-forward",
        _divides(lambda config: config.model.ffn),
    ),
    Refused(
        "tensor does not divide model.vocab",
        "each rank holds an equal part of the vocabulary: pad it",
        _divides(lambda config: config.model.vocab),
    ),
    Refused(
        "tensor does not divide data.sequence",
        "between the matrices each rank holds an equal part of the sequence",
        _divides(lambda config: config.data.sequence),
    ),
    Refused(
        "tensor with experts",
        "an expert's own matrices are not cut",
        lambda layout, config: "layout.tensor = 1" if layout.tensor > 1 and config.model.experts else "",
    ),
    Refused(
        "replicate.static_graph with shard or tensor",
        "it is a promise to DDP, which such a layout does not use",
        lambda layout, config: (
            "replicate.static_graph = false" if _spread(layout) and config.replicate.static_graph else ""
        ),
    ),
    Refused(
        "replicate.compress with shard or tensor",
        "FSDP2 would round at every micro-step what DDP rounds once",
        lambda layout, config: (
            "replicate.compress = none" if _spread(layout) and config.replicate.compress != "none" else ""
        ),
    ),
    Refused(
        "shard.keep does not divide the shard degree",
        "after the forward pass a part of the shard group holds the parameters",
        lambda layout, config: (
            f"shard.keep = {nearest([n for n in range(1, layout.shard + 1) if layout.shard % n == 0], _keep(config))}"
            if config.layout.shard == "parameters" and layout.shard % _keep(config)
            else ""
        ),
    ),
    Refused(
        "compute.segment without compute.recompute = full",
        "only whole blocks are recomputed together",
        lambda _layout, config: (
            "compute.segment = 1, or compute.recompute = full"
            if config.compute.segment > 1 and config.compute.recompute != "full"
            else ""
        ),
    ),
)
"""The table of what is refused. A user's own model brings its own cuts: only the rules without a model hold for it."""

OF_THE_DECODER = REFUSED[:5]


def _keep(config: RunConfig) -> int:
    return config.shard.keep or 1


def checked(config: RunConfig, own_model: bool = False) -> tuple[Layout, Batch]:
    """The layout and the batch algebra of a config, or a refusal that names what would be possible."""
    layout = Layout.of(config.layout)
    for rule in REFUSED:
        if own_model and rule in OF_THE_DECODER:
            continue
        if instead := rule.applies(layout, config):
            raise ConfigError(f"layout {layout}: {rule.what}: {rule.why}", f"allowed: {instead}")
    batch = batch_algebra(config.batch, layout.data_degree)
    if config.replicate.static_graph and batch.accumulation > 1:
        raise ConfigError(
            f"replicate.static_graph = true with accumulation {batch.accumulation}: DDP fails on a first pass unsynced",
            f"allowed: replicate.static_graph = false, or batch.micro = {batch.local}",
        )
    return layout, batch
