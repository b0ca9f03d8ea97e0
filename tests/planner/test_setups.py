"""Tests of the ten well-known set-ups: the published MFU is predicted, and the published layout is near the plan."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.setups import SETUPS, TOLERANCE, Comparison, Setup, compare


@cache
def compared(setup_name: str) -> Comparison:
    return compare(next(setup for setup in SETUPS if setup.name == setup_name))


def test_the_ten_setups_have_a_source_and_a_layout_of_all_devices():
    assert len(SETUPS) == 10
    for setup in SETUPS:
        assert setup.source
        assert (setup.tokens is None) or (setup.teraflops is None)


@pytest.mark.long
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_published_mfu_is_predicted_within_ten_percent(setup: Setup):
    comparison = compared(setup.name)
    assert comparison.run.job.layout.ranks == comparison.run.job.cluster.device_count
    assert comparison.mfu_error is None or abs(comparison.mfu_error) <= TOLERANCE


@pytest.mark.long
def test_published_layouts_are_within_ten_percent_of_the_plan():
    slower = [setup.name for setup in SETUPS if compared(setup.name).slowdown > 1 + TOLERANCE]
    assert slower == []


@pytest.mark.long
def test_seven_billion_parameters_on_two_small_devices_are_planned_with_offload():
    assert compared("Llama 2 7B on 2 A100-40").pick.job.offload
