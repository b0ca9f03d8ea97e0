"""With precision.deterministic = true, runs on CUDA are bitwise equal, also after a kill and a restart."""

from __future__ import annotations

import pytest

from tests.core.gpu.cuda_steps import trained_digest

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("case", ["one rank", "experts", "DDP", "FSDP2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_deterministic_runs_and_resumes_are_bitwise_equal(case, compiled):
    setting = f"--compile.enabled={str(compiled).lower()}"
    first = trained_digest(case, setting)
    assert trained_digest(case, setting) == first
    assert trained_digest(case, setting, faults="step.backward:rank0:kill@step7") == first
