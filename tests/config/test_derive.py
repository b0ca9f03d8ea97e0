"""The batch algebra and the two fingerprints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config import (
    Batch,
    BatchConfig,
    config_to_dict,
    derive_batch,
    fingerprint,
    identity,
    load_config,
    placement,
)
from meshwright.errors import ConfigError
from meshwright.topology.unsupported import validate


@given(st.integers(1, 500), st.integers(1, 50), st.none() | st.integers(1, 50))
def test_global_is_micro_times_degree_times_accumulation_or_it_is_refused(whole, replicas, micro):
    try:
        batch = derive_batch(BatchConfig(whole, micro), replicas)
    except ConfigError as refusal:
        assert whole % (replicas * (micro or 1))
        assert "allowed: " in str(refusal)
    else:
        assert batch.micro * batch.replicas * batch.accumulation == whole


def test_a_refusal_gives_numbers_that_would_work():
    with pytest.raises(ConfigError) as refusal:
        derive_batch(BatchConfig(100, 8), 4)
    assert "batch.micro = 1, 5, 25, or batch.global = 96 or 128" in str(refusal.value)
    derive_batch(BatchConfig(100, 5), 4)
    derive_batch(BatchConfig(96, 8), 4)


def test_the_algebra_is_told_in_words():
    assert str(Batch(16, 4, 2, 2)) == "global 16 = micro 4 x data-parallel 2 x accumulation 2"


@pytest.mark.parametrize(
    "word",
    [
        "--seed=1",
        "--model.layers=5",
        "--batch.global=32",
        "--optimizer.lr=0.1",
        "--data.sequence=64",
        "--precision.compute=bf16",
        "--ddp.comm_hook=bf16_compress",
        "--eval.holdout=0.1",
        "--schedule.kind=linear",
    ],
)
def test_what_changes_the_numbers_changes_the_identity(word):
    assert fingerprint(identity(load_config(overrides=[word]))) != fingerprint(identity(load_config()))


@pytest.mark.parametrize(
    "word",
    [
        "--layout.replicate=4",
        "--batch.micro=2",
        "--data.workers=3",
        "--launch.threads=2",
        "--ddp.bucket_cap_mb=1",
        "--eval.every=7",
        "--log_every=1",
    ],
)
def test_what_does_not_change_the_numbers_changes_the_placement_alone(word):
    changed, usual = load_config(overrides=[word]), load_config()
    assert fingerprint(identity(changed)) == fingerprint(identity(usual))
    assert fingerprint(placement(changed)) != fingerprint(placement(usual))


def test_every_key_is_identity_or_placement():
    config = load_config()
    assert not identity(config).keys() & placement(config).keys()
    leaves = sum(len(value) if isinstance(value, dict) else 1 for value in config_to_dict(config).values())
    assert len(identity(config)) + len(placement(config)) == leaves - 1  # data.mixture is empty: no leaf


def test_a_static_graph_with_accumulation_is_refused():
    with pytest.raises(ConfigError, match="static_graph"):
        validate(load_config(overrides=["--ddp.static_graph=true", "--batch.micro=4"]))
