"""Layouts of at most eight ranks that together use every axis, and every pair of axes, of a larger layout. Torch-free.

A layout is described by the degrees of its axes. The expert axis has no ranks of its own: it is part of a small layout
if that layout has an axis whose ranks the user's expert axis reuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from meshwright.base.config import LayoutConfig
from meshwright.base.topology.axes import AXES
from meshwright.base.topology.layout import Layout

MAX_RANKS = 8
"""The most ranks of a proof run."""
MAX_RANKS_AFTER_RESUME = 4
"""The most ranks of the layout on which a proof run is resumed."""
PREFERENCE = ("tensor", "context", "pipeline", "shard", "replicate")
"""The axes, those that change the computation most first."""
THREE_FIRST = ("context", "tensor", "shard", "pipeline", "replicate")
"""The order in which the axes are tried with degree three."""


def small_layouts(config: LayoutConfig, max_ranks: int = MAX_RANKS) -> list[LayoutConfig]:
    """The layout itself if it has at most `max_ranks` ranks. Otherwise layouts in which the axes have degree two, or
    four if it is the only one: as few as cover every pair of axes that fits together.
    """
    layout = Layout.from_config(config)
    if layout.ranks <= max_ranks:
        return [config]
    used = [axis for axis in PREFERENCE if axis in layout.active_mesh_axes]
    if max_ranks == 1:
        return [small_layout(config, {}, max_ranks)]
    subsets = list(combinations(used, min(len(used), max_ranks.bit_length() - 1)))
    covered: set[frozenset[str]] = set()
    chosen: list[LayoutConfig] = []
    while True:
        gains = {axes: pairs(small_layout(config, dict.fromkeys(axes, 2), max_ranks)) - covered for axes in subsets}
        best = max(subsets, key=lambda axes: len(gains[axes]))
        if not gains[best]:
            return chosen
        covered |= gains[best]
        degree = min(4, max_ranks) if len(best) == 1 else 2
        chosen.append(small_layout(config, dict.fromkeys(best, degree), max_ranks))


def pairs(config: LayoutConfig) -> set[frozenset[str]]:
    """The axes that a layout uses, and the pairs of them."""
    axes = Layout.from_config(config).active_axes
    return {frozenset(pair) for pair in product(axes, axes)}


def layouts_with_degree_three(config: LayoutConfig) -> Iterator[LayoutConfig]:
    """Layouts in which one axis has degree three and one other axis degree two, in order of preference; a single rank
    becomes three replicas.
    """
    layout = Layout.from_config(config)
    only = "replicate" if config.shard == "none" else "shard"
    used = [axis for axis in PREFERENCE if axis in layout.active_mesh_axes] or [only]
    for axis in sorted(used, key=THREE_FIRST.index):
        for other in [other for other in used if other != axis] or [axis]:
            yield small_layout(config, {other: 2} | {axis: 3}, MAX_RANKS)


def small_layout(config: LayoutConfig, degrees: dict[str, int], max_ranks: int) -> LayoutConfig:
    """The layout with these degrees; axes without one are not used. The sharding stays if its axis is used."""
    user = Layout.from_config(config)
    degrees = {axis: degrees.get(axis, 1) for axis in AXES}
    outer, inner = user.expert_axes
    expert = 1
    if user.expert > 1 and degrees[outer] * degrees[inner] > 1:
        ranks = Layout(**degrees).ranks
        grown = outer if degrees[outer] > 1 else inner
        if user.expert < user.expert_axes_size and degrees[outer] * degrees[inner] == 2 and 2 * ranks <= max_ranks:
            degrees[grown] *= 2  # so that several groups of ranks hold the same experts
        size = degrees[outer] * degrees[inner]
        expert = size if user.expert == user.expert_axes_size else min(n for n in range(2, size + 1) if size % n == 0)
    replicate, shard = degrees["replicate"], degrees["shard"]
    if config.shard == "none":
        small = replace(config, replicate=replicate)
    elif config.shard_degree is None:
        small = replace(config, replicate=shard)
    elif shard > 1:
        small = replace(config, replicate=replicate, shard_degree=shard)
    else:
        small = replace(config, replicate=replicate, shard="none", shard_degree=None)
    pipeline, context, tensor = degrees["pipeline"], degrees["context"], degrees["tensor"]
    return replace(small, pipeline=pipeline, context=context, tensor=tensor, expert=expert)


def layouts_after_resume(config: LayoutConfig) -> list[LayoutConfig]:
    """Layouts of at most `MAX_RANKS_AFTER_RESUME` ranks, those first that differ from the layout on most axes."""
    layout = Layout.from_config(config)
    degrees = (1, 2, 3, 4)
    candidates = [
        LayoutConfig(replicate=replicate, shard=shard, pipeline=pipeline, context=context, tensor=tensor, expert=expert)
        for replicate, pipeline, context, tensor in product(degrees, (1, 2), (1, 2), (1, 2))
        for shard in ("none", "parameters")
        for expert in {1, min(layout.expert, 2)}
        if 1 < replicate * pipeline * context * tensor <= MAX_RANKS_AFTER_RESUME and (shard == "none" or replicate > 1)
    ]

    def difference(candidate: LayoutConfig) -> tuple[bool, int, bool]:
        small = Layout.from_config(candidate)
        changed = sum(getattr(small, axis) != getattr(layout, axis) for axis in (*AXES, "expert"))
        return small.data_degree != layout.data_degree, changed, candidate.shard != config.shard

    return sorted(candidates, key=difference, reverse=True)
