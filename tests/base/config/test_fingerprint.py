"""Tests of identity and placement: which settings change the fingerprint of a run."""

from __future__ import annotations

import pytest

from meshwright.base.config import config_to_dict, fingerprint, identity, load_config, placement


@pytest.mark.parametrize(
    "override",
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
def test_setting_that_changes_the_numbers_changes_the_identity_fingerprint(override):
    assert fingerprint(identity(load_config(overrides=[override]))) != fingerprint(identity(load_config()))


@pytest.mark.parametrize(
    "override",
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
def test_placement_setting_changes_only_the_placement_fingerprint(override):
    changed, default = load_config(overrides=[override]), load_config()
    assert fingerprint(identity(changed)) == fingerprint(identity(default))
    assert fingerprint(placement(changed)) != fingerprint(placement(default))


def test_every_key_is_either_identity_or_placement():
    config = load_config()
    assert not identity(config).keys() & placement(config).keys()
    leaves = sum(len(value) if isinstance(value, dict) else 1 for value in config_to_dict(config).values())
    assert len(identity(config)) + len(placement(config)) == leaves - 3  # three tables are empty
