"""The long matrices of `make test-all`: every preset on several rank counts, and more lengths of the sample stream."""

from __future__ import annotations

import pytest

from meshwright.base.config import PRESETS
from meshwright.prover.stream import check_stream
from tests.kit.small_run import load_cpu_config
from tests.prover.traced_cases import failed_runs


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_with_ddp_equals_the_reference(preset, ranks):
    options = (f"--preset={preset}", "--model.layers=3", f"--batch.global={12 * ranks}", f"--layout.replicate={ranks}")
    assert failed_runs(options) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2**62])
@pytest.mark.parametrize("samples", [2, 3, 16, 17, 1000, 65_537, 10**6, 10**12])
@pytest.mark.parametrize("holdout", [0.0, 0.01, 0.5])
def test_stream_contract_holds_for_lengths_seeds_and_holdouts(seed, samples, holdout):
    options = [
        f"--seed={seed}",
        "--data.kind=synthetic",
        f"--data.samples={samples}",
        f"--eval.holdout={holdout}",
        "--data.sequence=8",
    ]
    claims = check_stream(load_cpu_config(overrides=options))
    assert [measured for _, passed, measured, *_ in claims if not passed] == []
