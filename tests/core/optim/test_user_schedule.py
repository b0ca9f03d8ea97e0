"""A schedule of the user's is a function of the step and the number of steps, checked before the run."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.base.config import ScheduleConfig
from meshwright.core.optim.schedule import check_schedule, learning_rate
from meshwright.errors import ConfigError


def halving(step, steps):
    return 0.5 ** (4 * step / steps)


def test_factor_multiplies_the_peak_learning_rate_without_warm_up():
    check_schedule(halving, 8)
    rates = [learning_rate(step, 8, 2.0, ScheduleConfig(), halving) for step in range(8)]
    assert rates == [2.0 * halving(step, 8) for step in range(8)]


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, None, "fast"])
def test_value_that_is_no_learning_rate_is_refused(value):
    with pytest.raises(ConfigError, match="the schedule returned"):
        check_schedule(lambda step, steps: value, 8)


def test_schedule_with_state_is_refused():
    calls = itertools.count(1)
    with pytest.raises(ConfigError, match="for step"):
        check_schedule(lambda step, steps: 1.0 / next(calls), 8)
