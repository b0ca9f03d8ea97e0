"""Scaled-down configs are valid for every valid layout, run on at most eight ranks, and keep every axis."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from meshwright.config import load_config
from meshwright.prover.layouts import proof_configs
from meshwright.prover.scale_down import MAX_RANKS
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.unsupported import validate
from tests.prover.valid_configs import valid_configs


@settings(max_examples=400)
@given(valid_configs())
def test_proof_configs_are_valid_on_eight_ranks_and_keep_the_axes(config):
    layout, _ = validate(config)
    proofs, _ = proof_configs(config)
    assert len(proofs) == 3
    for proof in proofs:
        small, batch = validate(proof)
        assert 2 <= small.ranks <= MAX_RANKS
        assert batch.accumulation > 1
        assert set(small.active_mesh_axes) <= set(layout.active_mesh_axes) or layout.ranks == 1
        assert len(small.active_mesh_axes) >= min(3, len(layout.active_mesh_axes))
        assert (small.expert > 1) == (layout.expert > 1)
        assert bool(proof.model.experts) == bool(config.model.experts)
        assert stages_per_rank(proof) == min(stages_per_rank(config), 2)


LARGE = {
    "expert 8, pipeline 4": (
        "mixtral-8x7b",
        "--layout.expert=8 --layout.pipeline=4 --layout.shard=parameters --layout.replicate=16",
        Layout(pipeline=2, shard=4, expert=2),
    ),
    "expert 8, shard 8": (
        "mixtral-8x7b",
        "--layout.expert=8 --layout.shard=parameters --layout.replicate=8 --layout.tensor=2 --layout.context=2",
        Layout(shard=2, context=2, tensor=2, expert=2),
    ),
    "four stages per rank, pipeline 8": (
        "llama-70b",
        "--layout.pipeline=8 --pipeline.schedule=interleaved --pipeline.stages=4 --layout.replicate=4",
        Layout(pipeline=2, replicate=2),
    ),
    "context 16": (
        "llama-70b",
        "--layout.replicate=1 --layout.context=16 --context.method=all-to-all",
        Layout(context=2),
    ),
    "all axes of a dense model": (
        "llama-405b",
        "--layout.replicate=2 --layout.shard=parameters --layout.shard_degree=8 --layout.pipeline=16 --layout.context=8"
        " --layout.tensor=8",
        Layout(pipeline=2, context=2, tensor=2),
    ),
    "all axes but replicate": (
        "llama-405b",
        "--layout.replicate=1 --layout.shard=parameters --layout.shard_degree=8 --layout.pipeline=16 --layout.context=8"
        " --layout.tensor=8",
        Layout(pipeline=2, context=2, tensor=2),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_layout_is_scaled_down_on_the_same_axes(name):
    preset, options, expected = LARGE[name]
    proofs, note = proof_configs(load_config(overrides=[f"--preset={preset}", *options.split()]))
    assert {validate(proof)[0] for proof in proofs} == {expected}
    assert "layout scaled down" in note


def test_model_with_few_kv_heads_keeps_fewer_kv_heads_than_attention_ranks():
    options = ["--layout.replicate=1", "--layout.context=4", "--context.method=all-to-all", "--model.heads=8"]
    proofs, _ = proof_configs(load_config(overrides=options))
    assert (proofs[0].model.heads, proofs[0].model.kv_heads) == (4, 2)
    proofs, _ = proof_configs(load_config(overrides=[*options, "--model.kv_heads=8"]))
    assert (proofs[0].model.heads, proofs[0].model.kv_heads) == (4, 4)


@pytest.mark.parametrize("options", ["--layout.tensor=3 --model.kv_heads=3 --model.heads=3", "--layout.context=3"])
def test_scaled_sequence_divides_over_three_ranks(options):
    model = ["--layout.replicate=1", "--model.width=192", "--model.vocab=258", "--model.ffn=360", "--data.sequence=96"]
    proofs, _ = proof_configs(load_config(overrides=[*model, *options.split()]))
    assert proofs[0].data.sequence == 18
    assert validate(proofs[0])[0].ranks == 3
