"""Scaled-down configs are valid for every valid layout, run on at most eight ranks, and keep every axis."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import load_config
from meshwright.prover.layouts import proof_configs
from meshwright.prover.recovery import MAX_RECOVERY_RANKS, scale_config
from meshwright.prover.scale_down import MAX_RANKS, scale_layout
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.schedules import SCHEDULES
from meshwright.topology.unsupported import min_shard_group_size, validate


@st.composite
def valid_configs(draw):
    """A valid config over all axes."""
    layout = {axis: draw(st.sampled_from([1, 2, 3, 4, 8, 16])) for axis in ("replicate", "pipeline", "context")}
    layout["tensor"] = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    schedule, method = draw(st.sampled_from(tuple(SCHEDULES))), draw(st.sampled_from(["ring", "all-to-all"]))
    barred = {"gradients"} if layout["pipeline"] > 1 else set()
    barred |= {"parameters"} if layout["pipeline"] > 1 and SCHEDULES[schedule].splits_backward else set()
    shard = draw(st.sampled_from(sorted({"none", "optimizer", "gradients", "parameters"} - barred)))
    degree = draw(st.sampled_from([None, 2, 3, 4, 16])) if shard != "none" else None
    config = load_config()
    mesh = Layout.from_config(replace(config.layout, **layout, shard=shard, shard_degree=degree))
    layout["expert"] = draw(
        st.sampled_from([n for n in range(1, mesh.expert_axes_size + 1) if mesh.expert_axes_size % n == 0])
    )
    replicates_shards = layout["pipeline"] > 1 or layout["tensor"] > 1
    shared = min_shard_group_size(replace(mesh, expert=layout["expert"]))
    keeps = [True, False] if replicates_shards or shared < 2 else [True, False, shared]
    stages = draw(st.integers(SCHEDULES[schedule].min_stages, SCHEDULES[schedule].max_stages or 4))
    tensor, context = layout["tensor"], layout["context"]
    kv_heads = tensor * draw(st.sampled_from([1, 2, 3]))
    heads = lcm(kv_heads, tensor * (context if method == "all-to-all" else 1)) * draw(st.sampled_from([1, 2, 8]))
    model = replace(
        config.model,
        vocab=tensor * draw(st.integers(2, 200)),
        width=heads * draw(st.sampled_from([2, 8, 128])),
        layers=layout["pipeline"] * stages + draw(st.integers(0, 5)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=tensor * draw(st.integers(1, 100)),
        experts=layout["expert"] * draw(st.integers(1, 3)) if layout["expert"] > 1 else draw(st.integers(0, 9)),
        experts_active=1,
        experts_shared=draw(st.integers(0, 2)),
        separator=draw(st.sampled_from([None, 1])),
    )
    model = replace(model, experts_active=draw(st.integers(1, model.experts or 2)))
    return replace(
        config,
        model=model,
        layout=replace(config.layout, **layout, shard=shard, shard_degree=degree),
        pipeline=replace(config.pipeline, schedule=schedule, stages=stages),
        context=replace(config.context, method=method),
        data=replace(config.data, sequence=2 * tensor * context * draw(st.integers(1, 9))),
        batch=replace(config.batch, global_=mesh.data_degree * 2 * layout["pipeline"], micro=1),
        fsdp=replace(config.fsdp, reshard_after_forward=draw(st.sampled_from(keeps))),
    )


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


@settings(max_examples=200)
@given(valid_configs())
def test_recovery_config_is_valid_on_four_ranks(config):
    layout, _ = scale_layout(config.layout, MAX_RECOVERY_RANKS)
    proof, _ = scale_config(config, layout, steps=5)
    assert 2 <= validate(proof)[0].ranks <= MAX_RECOVERY_RANKS


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
