"""No false alarm: random configs without a fault pass all of their proof runs."""

from __future__ import annotations

import pytest

from tests.prover.clean_configs import clean_options
from tests.prover.traced_cases import failed_runs

QUICK = (0, 5, 24, 39, 44, 106, 117)
"""Seeds of cheap configs that together use every axis, every precision and both context methods."""
ALL = range(200)


@pytest.mark.parametrize("seed", QUICK)
def test_config_without_fault_passes(seed):
    assert failed_runs(clean_options(seed)) == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ALL)
def test_every_config_without_fault_passes(seed):
    assert failed_runs(clean_options(seed)) == []
