"""The policies on values that are not finite and on samples that cannot be decoded: equal on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.base.config import DataConfig, NumericsConfig
from meshwright.base.records.events import read_events
from meshwright.errors import DataError, NumericsError
from tests.kit.custom_model import Points, custom_config, run_custom, samples_of_step, step_records


def test_nan_stops_every_rank_in_the_same_step_and_names_the_first_module(tmp_path):
    poison = samples_of_step(2)[6]  # in the third step, on rank 1
    with pytest.raises(NumericsError) as failed:
        run_custom(tmp_path / "r", custom_config(), source=Points(nan={poison}))
    assert failed.value.exit_code == 7
    assert "rank 1 step 2: loss nan or its gradient is not finite, first in model.0" in str(failed.value)
    for rank in (0, 1):
        steps = step_records(tmp_path / "r", rank)
        assert [e["step"] for e in steps] == [0, 1, 2]
        assert steps[2]["loss"] is None
        assert steps[2]["skipped"]


def test_nan_step_is_skipped_on_every_rank_and_counted_with_on_nonfinite_skip(tmp_path):
    poison = samples_of_step(2)[6]
    config = custom_config(numerics=NumericsConfig(on_nonfinite="skip"))
    result, steps = run_custom(tmp_path / "r", config, source=Points(nan={poison}))
    assert (result.steps, result.skipped) == (4, 1)
    assert [e.get("skipped", False) for e in steps] == [False, False, True, False]
    [event] = [e for e in read_events(tmp_path / "r" / "events" / "rank-00001.jsonl") if e["kind"] == "nonfinite"]
    assert event["module"] == "model.0"


def test_skip_budget_stops_a_run_that_stays_nonfinite(tmp_path):
    config = custom_config(numerics=NumericsConfig(on_nonfinite="skip", skip_budget=1))
    with pytest.raises(NumericsError, match="step 1"):
        run_custom(tmp_path / "r", config, source=Points(nan=set(range(32))))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_sample_stops_every_rank_before_the_update(tmp_path, workers):
    broken = samples_of_step(1)[5]  # in the second step, on rank 1
    config = custom_config(data=DataConfig(workers=workers))
    with pytest.raises(DataError) as failed:
        run_custom(tmp_path / "r", config, source=Points(broken={broken}))
    assert failed.value.exit_code == 6
    assert f"rank 1 step 1: sample {broken} (source Points, index {broken}) cannot be decoded" in str(failed.value)
    for rank in (0, 1):
        assert [e["step"] for e in step_records(tmp_path / "r", rank)] == [0]


def test_quarantine_is_equal_on_any_number_of_ranks_and_stops_at_its_budget(tmp_path):
    broken = {samples_of_step(1)[5], samples_of_step(2)[0], samples_of_step(2)[1]}
    curves = []
    for ranks in (1, 2, 4):
        config = custom_config(ranks=ranks, data=DataConfig(on_bad_sample="quarantine", bad_sample_budget=3))
        _, steps = run_custom(tmp_path / str(ranks), config, source=Points(broken=broken))
        assert [e["tokens"] for e in steps] == [8, 7, 6, 8]
        curves.append([e["loss"] for e in steps])
        quarantined = {
            e["sample"]
            for r in range(ranks)
            for e in read_events(tmp_path / str(ranks) / "events" / f"rank-0000{r}.jsonl")
            if e["kind"] == "bad_sample"
        }
        assert quarantined == broken
    assert np.allclose(curves[0], curves[1], rtol=1e-5)
    assert np.allclose(curves[0], curves[2], rtol=1e-5)
    config = custom_config(data=DataConfig(on_bad_sample="quarantine", bad_sample_budget=2))
    with pytest.raises(DataError, match=r"data\.bad_sample_budget = 2"):
        run_custom(tmp_path / "over", config, source=Points(broken=broken))
