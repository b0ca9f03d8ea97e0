"""Comparison of measured and predicted communication volume, row by row; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.comm_volume import CollectiveVolume

EXPERT_TOKENS = ("expert", "all_to_all")
"""The number of tokens that a rank's experts receive depends on the data. The sum over an expert group does not."""


@dataclass(frozen=True)
class VolumeComparison:
    """The predicted and the measured volume of one collective on one axis, of one rank or of several together."""

    ranks: tuple[int, ...]
    axis: str
    collective: str
    predicted: CollectiveVolume | None
    measured: CollectiveVolume | None

    @property
    def equal(self) -> bool:
        return self.predicted == self.measured

    def __str__(self) -> str:
        one = len(self.ranks) == 1
        ranks = f"rank {self.ranks[0]}" if one else f"ranks {', '.join(map(str, self.ranks))} together"
        measured, predicted = (f"{row.message_bytes:,}" if row else "0" for row in (self.measured, self.predicted))
        return f"{ranks}: {self.axis} {self.collective}: {measured} bytes measured, {predicted} bytes predicted"


def compare_volumes(
    layout: Layout,
    predicted: Mapping[int, list[CollectiveVolume]],
    measured: Mapping[int, list[CollectiveVolume]],
    excluded_axes: Collection[str] = (),
) -> Iterator[VolumeComparison]:
    """Compares every rank that has both figures. Tokens sent to experts and back are compared per expert group."""
    ranks = sorted(predicted.keys() & measured.keys())
    expected, counted = (
        {rank: [row for row in rows[rank] if row.axis not in excluded_axes] for rank in ranks}
        for rows in (predicted, measured)
    )
    for rank in ranks:
        yield from compare_rows((rank,), without_expert_tokens(expected[rank]), without_expert_tokens(counted[rank]))
    for group in layout.groups("expert") if layout.expert > 1 else ():
        if set(group) <= set(ranks):
            sums = (sum_expert_tokens([rows[rank] for rank in group]) for rows in (expected, counted))
            yield from compare_rows(tuple(group), *sums)


def without_expert_tokens(rows: list[CollectiveVolume]) -> list[CollectiveVolume]:
    return [row for row in rows if (row.axis, row.collective) != EXPERT_TOKENS]


def sum_expert_tokens(ranks: list[list[CollectiveVolume]]) -> list[CollectiveVolume]:
    """The sum over ranks. Wire bytes are left out, because they are rounded down per rank."""
    messages = [row.message_bytes for rows in ranks for row in rows if (row.axis, row.collective) == EXPERT_TOKENS]
    return [CollectiveVolume(*EXPERT_TOKENS, sum(messages), 0)]


def compare_rows(
    ranks: tuple[int, ...], predicted: list[CollectiveVolume], measured: list[CollectiveVolume]
) -> Iterator[VolumeComparison]:
    by_key = [{(row.axis, row.collective): row for row in rows} for rows in (predicted, measured)]
    for key in sorted(by_key[0].keys() | by_key[1].keys()):
        yield VolumeComparison(ranks, *key, by_key[0].get(key), by_key[1].get(key))
