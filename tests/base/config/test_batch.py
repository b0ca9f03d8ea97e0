"""Tests of the batch sizes: global = micro x data-parallel degree x accumulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.base.config import Batch, BatchConfig, derive_batch, load_config
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError


@given(st.integers(1, 500), st.integers(1, 50), st.none() | st.integers(1, 50))
def test_accumulation_divides_the_global_batch_or_raises_config_error(total, replicas, micro):
    try:
        batch = derive_batch(BatchConfig(total, micro), replicas)
    except ConfigError as error:
        assert total % (replicas * (micro or 1))
        assert error.hint.startswith("expected ")
    else:
        assert batch.micro * batch.replicas * batch.accumulation == total


def test_batch_error_suggests_sizes_that_are_valid():
    with pytest.raises(ConfigError) as raised:
        derive_batch(BatchConfig(100, 8), 4)
    assert "batch.micro = 1, 5, 25, or batch.global = 96 or 128" in str(raised.value)
    derive_batch(BatchConfig(100, 5), 4)
    derive_batch(BatchConfig(96, 8), 4)


def test_batch_prints_its_factors():
    assert str(Batch(16, 4, 2, 2)) == "global 16 = micro 4 x data-parallel 2 x accumulation 2"


def test_ddp_static_graph_with_gradient_accumulation_raises_config_error():
    with pytest.raises(ConfigError, match="static_graph"):
        validate(load_config(overrides=["--ddp.static_graph=true", "--batch.micro=4"]))
