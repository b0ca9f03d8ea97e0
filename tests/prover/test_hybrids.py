"""Layouts over all axes against one process: every axis, every pair, and the meshes of large runs, at a small size."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
from hybrids import HYBRIDS, words
from layout_faults import FP32, FP64, TIED, found

from meshwright.config import load_config
from meshwright.prover import layouts
from meshwright.prover.layouts import check_layouts, describe_settings, proof_configs
from meshwright.prover.scale_down import scale_layout
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES
from meshwright.topology.unsupported import validate

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")


def broken(promises) -> list[str]:
    return [f"{promise}: {measured}" for promise, kept, measured in promises if not kept]


def config_of(row):
    return load_config(overrides=words(row))


def test_there_are_87_layouts_and_none_is_refused():
    said = set()
    for row in HYBRIDS:
        proofs, note = proof_configs(config_of(row))
        layout, _ = validate(proofs[0])
        assert 2 <= layout.ranks <= 8
        assert "layout" not in note  # as it was asked for
        said.add((f"{layout}{describe_settings(proofs[0])}", proofs[0].model))
    assert len(said) == len(HYBRIDS) == 87


def test_every_pair_of_axes_is_among_them():
    axes = [Layout.from_config(config_of(row).layout).axes for row in HYBRIDS]
    met = {pair for used in axes for pair in combinations(sorted(used), 2)}
    assert met == set(combinations(sorted(AXES), 2))
    assert {len(used) for used in axes} == {1, 2, 3, 4}


def test_every_kind_of_every_axis_is_among_them():
    configs = [config_of(row) for row in HYBRIDS]
    assert {c.pipeline.schedule for c in configs if c.layout.pipeline == 8} == set(SCHEDULES)
    assert {c.context.method for c in configs if c.layout.context == 8} == {"ring", "all-to-all"}
    assert {c.layout.shard for c in configs if c.layout.expert > 1} == {"none", "optimizer", "gradients", "parameters"}
    assert {c.layout.shard for c in configs if c.layout.context > 1} == {"none", "optimizer", "gradients", "parameters"}
    assert {c.activation_checkpoint.mode for c in configs} == {"none", "full", "selective"}


@pytest.mark.long
def test_copies_of_shards_in_stages_of_cut_blocks_are_one_process(monkeypatch):
    """Two of each are sixteen ranks, which no other proof has."""
    monkeypatch.setattr(layouts, "scale_layout", partial(scale_layout, max_ranks=16))
    words = ("--layout.pipeline=2", "--layout.replicate=2", "--layout.shard=optimizer", "--layout.shard_degree=2")
    promises = found((*words, "--layout.tensor=2", "--model.layers=2"), (FP64,), monkeypatch)
    assert [promise.partition(" (")[0] for promise, *_ in promises] == ["pipeline 2 x replicate 2 x shard 2 x tensor 2"]
    assert broken(promises) == []


@pytest.mark.long
@pytest.mark.parametrize("row", HYBRIDS)
def test_every_hybrid_is_one_process(row):
    promises = list(check_layouts(config_of(row)))
    print(*promises, sep="\n")
    assert len(promises) == 3
    assert broken(promises) == []


COVERING = {
    "pipeline=2": (FP64, TIED),
    "pipeline=2 schedule=interleaved separator=0": (FP64,),
    "pipeline=2 schedule=zero-bubble stages=1": (FP32,),
    "pipeline=2 schedule=zbv": (TIED,),
    "pipeline=2 schedule=dualpipev": (FP64,),
    "context=2": (FP64, FP32, TIED),
    "context=2 method=all-to-all heads=4 kv_heads=1 recompute=selective": (FP64, TIED),
    "replicate=2 expert=2 experts=4 ffn=16": (FP64, FP32),
    "replicate=2 shard=parameters expert=2 experts=4 experts_shared=1": (FP64,),
    "replicate=2 pipeline=2": (FP64,),
    "replicate=2 shard=parameters pipeline=2": (TIED,),
    "tensor=2 pipeline=2 schedule=zbv": (FP64,),
    "context=2 pipeline=2": (TIED,),
    "replicate=2 shard=parameters context=2": (TIED,),
    "context=2 tensor=2": (FP64,),
    "replicate=2 tensor=2 expert=2 experts=4 experts_shared=1": (FP64,),
    "context=2 expert=2 experts=4": (FP64, TIED),
    "replicate=2 pipeline=2 expert=2 experts=4": (FP64,),
}


@pytest.mark.parametrize("row", COVERING)
def test_a_covering_hybrid_is_one_process(row, monkeypatch):
    promises = found(words(row), COVERING[row], monkeypatch)
    assert len(promises) == len(COVERING[row])
    assert broken(promises) == []
