"""Ranges of steps are half-open, ascending and bounded."""

from __future__ import annotations

import pytest

from meshwright.base.config import load_config
from meshwright.base.config.constraints import parse_step_ranges
from meshwright.errors import ConfigError


def test_step_ranges_exclude_their_end() -> None:
    assert parse_step_ranges("10:13, 50:52", "--steps", 100) == [range(10, 13), range(50, 52)]
    assert parse_step_ranges("", "--steps", 100) == []


@pytest.mark.parametrize(
    "text", ["10", "10:", ":3", "13:10", "5:5", "-1:3", "1:3:2", "10:13,11:12", "a:b", "1:" + "9" * 40]
)
def test_profile_steps_that_are_no_ranges_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError, match=r"profile.steps = .* is not a list of step ranges.*expected FIRST:END"):
        load_config(overrides=[f"--profile.steps={text}"])


def test_profile_of_too_many_steps_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"names 1,000 steps.*expected at most 200"):
        load_config(overrides=["--profile.steps=0:1000"])
