"""A step on CUDA never waits for the device: torch reports no synchronizing operation."""

from __future__ import annotations

import pytest

from tests.core.gpu.cuda_steps import CASES, synchronizations

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_step_issues_no_host_synchronization(case, compiled):
    assert synchronizations(case, f"--compile.enabled={str(compiled).lower()}") == []
