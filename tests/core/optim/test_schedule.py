"""Learning-rate schedules warm up, reach their peak and end at their floor."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.base.config import ScheduleConfig
from meshwright.core.optim.schedule import learning_rate


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_learning_rate_warms_up_peaks_and_ends_at_its_floor(kind):
    schedule = ScheduleConfig(kind=kind, warmup=10, floor=0.1, decay=0.2)
    rates = [learning_rate(step, 100, 2.0, schedule) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == 2.0
    assert rates[-1] == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    if kind == "wsd":
        assert rates[79] == 2.0 > rates[81]
    if kind == "linear":
        assert rates[55] - rates[56] == pytest.approx(rates[20] - rates[21])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_learning_rate_of_a_short_run_is_finite(steps):
    for kind in ("cosine", "linear", "wsd"):
        assert all(0 <= learning_rate(s, steps, 1.0, ScheduleConfig(kind=kind, warmup=2)) <= 1 for s in range(steps))
