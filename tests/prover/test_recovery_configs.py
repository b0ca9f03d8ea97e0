"""The configs of the recovery check are valid for every valid layout, and keep the user's settings."""

from __future__ import annotations

from hypothesis import given, settings

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.prover.shrink.runs import changes
from meshwright.prover.state.recovery_configs import (
    MAX_BLOCKS,
    MAX_RANKS,
    another_layout,
    kill_config,
    with_real_blocks,
)
from tests.kit.small_run import load_cpu_config
from tests.prover.valid_configs import valid_configs


@settings(max_examples=200)
@given(valid_configs())
def test_recovery_configs_are_valid_on_four_ranks_and_move_to_another_layout(config):
    for proof in (kill_config(config, 5), with_real_blocks(config, 5)):
        assert validate(proof)[0].ranks <= MAX_RANKS
        other = another_layout(proof)
        assert validate(other)[0].ranks <= MAX_RANKS
        assert Layout.from_config(other.layout) != Layout.from_config(proof.layout)
    assert with_real_blocks(config, 5).model.layers >= min(config.model.layers, MAX_BLOCKS)


def test_recovery_config_keeps_mode_precision_clip_and_layout_of_the_user():
    config = load_cpu_config(
        overrides=["--precision.compute=fp16", "--optimizer.clip=0.3", "--checkpoint.mode=async", "--model.layers=12"]
    )
    proof = kill_config(config, 5)
    kept = ("precision", "optimizer", "layout", "compile", "activation_checkpoint", "context", "fsdp", "pipeline")
    assert all(getattr(proof, name) == getattr(config, name) for name in kept)
    assert proof.checkpoint.mode == "async"
    assert with_real_blocks(config, 5).model.layers == 12
    listed = {change.split(" ")[0] for change in changes(config, proof)}
    assert {"checkpoint.every", "numerics.on_nonfinite", "launch.hang_timeout", "model.layers"} <= listed
