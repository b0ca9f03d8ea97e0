"""The best checkpoint interval, and the goodput that follows from it."""

from __future__ import annotations

import pytest

from meshwright.core.recover.checkpoint_interval import best_checkpoint_interval, goodput


def test_interval_follows_young_and_daly():
    assert best_checkpoint_interval(7.9 * 3600, 5.0) == pytest.approx(533.3, abs=0.1)


def test_goodput_is_highest_near_the_best_interval():
    mtbf, stall, outage = 7.9 * 3600, 5.0, 100.0
    best = best_checkpoint_interval(mtbf, stall)
    values = {factor: goodput(mtbf, stall, factor * best, outage) for factor in (0.5, 1.0, 2.0)}
    assert max(values, key=lambda factor: values[factor]) == 1.0


@pytest.mark.parametrize(("mtbf", "stall"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_interval_needs_positive_seconds(mtbf, stall):
    with pytest.raises(ValueError, match="expected positive seconds"):
        best_checkpoint_interval(mtbf, stall)
