"""Hybrid layouts equal a single process: every axis, every pair of axes, and the meshes of large runs, scaled down."""

from __future__ import annotations

from functools import cache, partial
from itertools import combinations

import pytest
from hybrid_layouts import HYBRIDS, overrides_of
from layout_checks import FP32, FP64, TIED, Case, check_cases, failed_claims

from meshwright.config import load_config
from meshwright.prover import layouts
from meshwright.prover.layouts import check_layouts, describe_settings, proof_configs
from meshwright.prover.scale_down import scale_layout
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES
from meshwright.topology.unsupported import validate

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")


def hybrid_config(row):
    return load_config(overrides=overrides_of(row))


def test_87_hybrid_layouts_are_valid():
    layouts = set()
    for row in HYBRIDS:
        proofs, note = proof_configs(hybrid_config(row))
        layout, _ = validate(proofs[0])
        assert 2 <= layout.ranks <= 8
        assert "layout scaled down" not in note
        layouts.add((f"{layout}{describe_settings(proofs[0])}", proofs[0].model))
    assert len(layouts) == len(HYBRIDS) == 87


def test_hybrid_layouts_cover_every_pair_of_axes():
    axes = [Layout.from_config(hybrid_config(row).layout).active_axes for row in HYBRIDS]
    covered = {pair for used in axes for pair in combinations(sorted(used), 2)}
    assert covered == set(combinations(sorted(AXES), 2))
    assert {len(used) for used in axes} == {1, 2, 3, 4}


def test_hybrid_layouts_cover_every_schedule_context_method_and_shard_level():
    configs = [hybrid_config(row) for row in HYBRIDS]
    assert {c.pipeline.schedule for c in configs if c.layout.pipeline == 8} == set(SCHEDULES)
    assert {c.context.method for c in configs if c.layout.context == 8} == {"ring", "all-to-all"}
    assert {c.layout.shard for c in configs if c.layout.expert > 1} == {"none", "optimizer", "gradients", "parameters"}
    assert {c.layout.shard for c in configs if c.layout.context > 1} == {"none", "optimizer", "gradients", "parameters"}
    assert {c.activation_checkpoint.mode for c in configs} == {"none", "full", "selective"}


@pytest.mark.long
def test_pipeline_replicate_shard_tensor_equals_single_process(monkeypatch):
    """Degree two on four axes needs sixteen ranks, more than any other check."""
    monkeypatch.setattr(layouts, "scale_layout", partial(scale_layout, max_ranks=16))
    options = ("--layout.pipeline=2", "--layout.replicate=2", "--layout.shard=optimizer", "--layout.shard_degree=2")
    [results] = check_cases([Case((*options, "--layout.tensor=2", "--model.layers=2"), (FP64,))])
    assert [claim.partition(" (")[0] for claim, *_ in results] == ["pipeline 2 x replicate 2 x shard 2 x tensor 2"]
    assert failed_claims(results) == []


@pytest.mark.long
@pytest.mark.parametrize("row", HYBRIDS)
def test_every_hybrid_layout_equals_single_process(row):
    results = list(check_layouts(hybrid_config(row)))
    print(*results, sep="\n")
    assert len(results) == 3
    assert failed_claims(results) == []


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


CASES = {row: Case(tuple(overrides_of(row)), proofs) for row, proofs in COVERING.items()}


@cache
def check_all(ranks: int) -> dict[str, list[tuple[str, bool, str]]]:
    """The results of all covering layouts with this number of ranks, from one launch."""
    cases = {row: case for row, case in CASES.items() if case.ranks == ranks}
    return dict(zip(cases, check_cases(list(cases.values())), strict=True))


@pytest.mark.parametrize("row", CASES)
def test_hybrid_layout_equals_single_process(row):
    results = check_all(CASES[row].ranks)[row]
    assert len(results) == len(COVERING[row])
    assert failed_claims(results) == []
