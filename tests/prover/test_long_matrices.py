"""The long matrices of `make test-all`: every preset on several rank counts, and more lengths of the sample stream."""

from __future__ import annotations

import pytest
from layout_checks import failed_claims

from meshwright.config import PRESETS, config_from_dict, load_config
from meshwright.prover.layouts import check_layouts
from meshwright.prover.stream import check_stream


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("bucket_cap_mb", [25.0, 0.01])
def test_every_preset_with_ddp_equals_single_process(preset, ranks, bucket_cap_mb):
    batch = {"global": 12 * ranks}
    config = config_from_dict(
        {"preset": preset, "batch": batch, "layout": {"replicate": ranks}, "ddp": {"bucket_cap_mb": bucket_cap_mb}}
    )
    assert failed_claims(check_layouts(config)) == []


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
    assert failed_claims(check_stream(load_config(overrides=options))) == []
