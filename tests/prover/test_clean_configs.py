"""No false alarm on any layout: random configs without a fault pass all of their proof runs. `make test` proves the
clean configs of one rank in test_clean_controls.py, and each axis in test_layouts.py and test_hybrid_layouts.py.
"""

from __future__ import annotations

import pytest

from tests.prover.clean_configs import clean_options
from tests.prover.traced_cases import failed_runs

PIPELINE_WITH_GPIPE = 0
"""The seed of a cheap config with the one schedule that test_hybrid_layouts.py leaves out."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=() if s == PIPELINE_WITH_GPIPE else pytest.mark.long) for s in range(200)]
)
def test_every_config_without_fault_passes(seed):
    assert failed_runs(clean_options(seed)) == []
