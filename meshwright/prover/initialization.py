"""Checks initial weights at the real number of rows, blocks and experts against their definition.

A proof run is too small for this: one random generator produces 1,024 rows, and its matrices have fewer. Here every
kind of parameter is initialized as ranks do it, in ranges of rows around the borders of generators and of shards. Large
matrices have few columns here: the definition treats all columns alike, and all of them would take minutes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.layout import Layout
from meshwright.core.models.init import init_shard
from meshwright.prover.claims import Claim
from meshwright.prover.oracle.initial_values import ROWS, initial_row_block, parameter_shapes

COLUMNS = 24
"""The columns of a large matrix that are checked."""
SMALL_MATRIX = 1 << 16
"""Up to this many elements, a matrix is checked with all of its columns."""
RANGES = 5
"""Ranges of rows per kind of parameter, beside those at its ends."""


@dataclass(frozen=True)
class WeightRange:
    """A part of a parameter, as a rank may have it."""

    name: str
    shape: tuple[int, ...]
    """the full shape"""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        ends = (start + size for start, size in zip(self.offset, self.sizes, strict=True))
        return f"{self.name}[{', '.join(f'{a}:{b}' for a, b in zip(self.offset, ends, strict=True))}]"


def check_initialization(config: RunConfig) -> Iterator[Claim]:
    """Yields whether the package initializes every kind of parameter by its definition."""
    ranges = list(weight_ranges(config))
    wrong = [part for part in ranges if not torch.equal(initialized(config, part), defined(config, part))]
    kinds = {kind_of(part.name) for part in ranges}
    rows = max(part.shape[-2] for part in ranges if len(part.shape) > 1)
    yield Claim(
        f"initial weights follow their definition: {len(kinds)} kinds of parameters with up to {rows:,} rows, "
        f"{config.model.layers} blocks",
        not wrong,
        f"{len(ranges) - len(wrong)} of {len(ranges)} ranges of rows"
        + (f"; the first wrong one is {wrong[0]}" if wrong else ""),
    )


def weight_ranges(config: RunConfig) -> Iterator[WeightRange]:
    """Ranges of every kind of parameter, in the first, the last and another block."""
    choices, layout = random.Random(0), Layout.from_config(config.layout)
    kinds: dict[str, list[str]] = {}
    shapes = parameter_shapes(config.model)
    for name in shapes:
        kinds.setdefault(kind_of(name), []).append(name)
    for names in kinds.values():
        first, last = names[0], names[-1]
        for name in dict.fromkeys((first, last, choices.choice(names))):
            yield from ranges_of(name, shapes[name], layout, choices)


def kind_of(name: str) -> str:
    """The name without the index of its block."""
    return re.sub(r"blocks\.\d+\.", "", name)


def ranges_of(name: str, shape: tuple[int, ...], layout: Layout, choices: random.Random) -> Iterator[WeightRange]:
    """Ranges of rows at the ends, and around random borders of generators and of shards."""
    if len(shape) == 1:
        yield WeightRange(name, shape, (0,), shape)
        return
    rows, columns = shape[-2], shape[-1]
    if rows * columns > SMALL_MATRIX:
        columns = min(columns, COLUMNS)
    shards = layout.tensor * layout.shard * layout.context
    chunk = -(-rows // shards)
    borders = {*range(ROWS, rows, ROWS), *range(chunk, rows, chunk)}
    chosen = {0, rows, *choices.sample(sorted(borders), min(RANGES, len(borders)))}
    for border in sorted(chosen):
        start, end = max(0, border - choices.randint(1, 9)), min(rows, border + choices.randint(1, 9))
        left = choices.randrange(columns)
        offset: tuple[int, ...] = (start, left)
        sizes: tuple[int, ...] = (end - start, choices.randint(1, columns - left))
        if len(shape) == 3:
            expert = choices.randrange(shape[0])
            offset, sizes = (expert, *offset), (min(2, shape[0] - expert), *sizes)
        yield WeightRange(name, (*shape[:-1], columns), offset, sizes)


def initialized(config: RunConfig, part: WeightRange) -> Tensor:
    """The values that a rank with this shard has."""
    local = torch.full(part.sizes, torch.nan)
    init_shard(local, part.name, part.shape, part.offset, run_spec(config), config.seed)
    return local


def defined(config: RunConfig, part: WeightRange) -> Tensor:
    """The values by the definition, from the row blocks that overlap the range."""
    if len(part.shape) == 1:
        return torch.zeros(part.sizes) if part.name.endswith("bias") else torch.ones(part.sizes)
    if len(part.shape) == 3:
        experts = range(part.offset[0], part.offset[0] + part.sizes[0])
        return torch.stack([defined(config, expert_range(part, expert)) for expert in experts])
    (start, left), (count, width) = part.offset, part.sizes
    blocks = range(start // ROWS, (start + count - 1) // ROWS + 1)
    values = torch.cat([initial_row_block(config, part.name, part.shape, b) for b in blocks])
    first = start - blocks[0] * ROWS
    return values[first : first + count, left : left + width]


def expert_range(part: WeightRange, expert: int) -> WeightRange:
    """The part of one expert's matrix."""
    return replace(
        part, name=f"{part.name}.{expert}", shape=part.shape[1:], offset=part.offset[1:], sizes=part.sizes[1:]
    )
