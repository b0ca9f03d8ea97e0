"""Fixtures of the tests of the rollout log."""

from __future__ import annotations

import pytest

from meshwright.core import faults


@pytest.fixture
def arm():
    """Arms faults in this process until the test ends."""
    yield lambda text: faults.arm(0, 0, {"MESHWRIGHT_FAULT": text})
    faults.ARMED_FAULTS.clear()
