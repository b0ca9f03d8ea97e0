"""Counted bytes beside those of the formulas, row by row; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from meshwright.planner.exact.comm_volume import CollectiveVolume
from meshwright.topology.layout import Layout

ROUTED = ("expert", "all_to_all")
"""How many rows come to a rank's experts depends on the data. What all ranks that share the experts send does not."""


@dataclass(frozen=True)
class VolumeComparison:
    """One collective on one axis, of one rank or of several together."""

    ranks: tuple[int, ...]
    axis: str
    collective: str
    expected: CollectiveVolume | None
    found: CollectiveVolume | None

    @property
    def equal(self) -> bool:
        return self.expected == self.found

    def __str__(self) -> str:
        one = len(self.ranks) == 1
        who = f"rank {self.ranks[0]}" if one else f"ranks {', '.join(map(str, self.ranks))} together"
        got, want = (f"{row.message_bytes:,}" if row else "nothing" for row in (self.found, self.expected))
        return f"{who}: {self.axis} {self.collective} sends {got} bytes, by the formula {want}"


def compare_volumes(
    layout: Layout,
    expected: Mapping[int, list[CollectiveVolume]],
    found: Mapping[int, list[CollectiveVolume]],
    left_out: Collection[str] = (),
) -> Iterator[VolumeComparison]:
    """Of every rank by itself; of rows on their way to experts and back, of the ranks that share these together. Ranks
    of which one of both is not known are left out.
    """
    ranks = sorted(expected.keys() & found.keys())
    wanted, got = ({rank: told(rows[rank], left_out) for rank in ranks} for rows in (expected, found))
    for rank in ranks:
        yield from compare_rows((rank,), unrouted(wanted[rank]), unrouted(got[rank]))
    for group in layout.groups("expert") if layout.expert > 1 else ():
        if set(group) <= set(ranks):
            sums = (routed([rows[rank] for rank in group]) for rows in (wanted, got))
            yield from compare_rows(tuple(group), *sums)


def told(rows: list[CollectiveVolume], left_out: Collection[str]) -> list[CollectiveVolume]:
    return [row for row in rows if row.axis not in left_out]


def unrouted(rows: list[CollectiveVolume]) -> list[CollectiveVolume]:
    return [row for row in rows if (row.axis, row.collective) != ROUTED]


def routed(ranks: list[list[CollectiveVolume]]) -> list[CollectiveVolume]:
    """The sum. Wire bytes are left out: they follow from each rank's own message, rounded down."""
    messages = [row.message_bytes for rows in ranks for row in rows if (row.axis, row.collective) == ROUTED]
    return [CollectiveVolume(*ROUTED, sum(messages), 0)]


def compare_rows(
    ranks: tuple[int, ...], expected: list[CollectiveVolume], found: list[CollectiveVolume]
) -> Iterator[VolumeComparison]:
    want, got = ({(row.axis, row.collective): row for row in rows} for rows in (expected, found))
    for key in sorted(want.keys() | got.keys()):
        yield VolumeComparison(ranks, *key, want.get(key), got.get(key))
