"""Ranks, coordinates and groups."""

from __future__ import annotations

import pytest

from meshwright.layout import Layout


def test_every_rank_has_its_own_place():
    layout = Layout(replicate=4)
    assert layout.ranks == layout.data_degree == 4
    assert [layout.data_coordinate(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert layout.group(2, "replicate") == [0, 1, 2, 3]
    assert str(layout) == "replicate 4"


def test_a_rank_outside_is_refused():
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        Layout(replicate=4).coordinates(4)
