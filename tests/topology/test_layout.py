"""Ranks, coordinates and groups; what is refused, and what is said instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import LayoutConfig, load_config
from meshwright.errors import ConfigError
from meshwright.topology.layout import AXES, Layout
from meshwright.topology.unsupported import UNSUPPORTED, validate


def test_every_rank_has_its_own_place():
    layout = Layout(replicate=4)
    assert layout.ranks == layout.data_degree == 4
    assert [layout.data_coordinate(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert layout.group(2, "replicate") == [0, 1, 2, 3]
    assert str(layout) == "replicate 4"


def test_a_rank_outside_is_refused():
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        Layout(replicate=4).coordinates(4)


CUBE = Layout(pipeline=2, replicate=2, shard=2, context=2, tensor=2)


def test_tensor_is_innermost_and_pipeline_outermost():
    assert CUBE.ranks == 32
    assert CUBE.group(0, "tensor") == [0, 1]
    assert CUBE.group(0, "context") == [0, 2]
    assert CUBE.group(0, "shard") == [0, 4]
    assert CUBE.group(0, "replicate") == [0, 8]
    assert CUBE.group(0, "pipeline") == [0, 16]


@pytest.mark.parametrize("axis", AXES)
def test_the_groups_of_an_axis_hold_every_rank_once(axis):
    groups = list(CUBE.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(32))
    for group in groups:
        for rank in group:
            assert CUBE.group(rank, axis) == group


def test_ranks_that_differ_on_tensor_or_context_alone_read_the_same_samples():
    assert CUBE.data_degree == 4
    for rank in range(CUBE.ranks):
        peers = CUBE.group(rank, "tensor", "context", "pipeline")
        assert {CUBE.data_coordinate(peer) for peer in peers} == {CUBE.data_coordinate(rank)}
        assert sum(CUBE.counts_tokens(peer) for peer in peers) == 1
    readers = [CUBE.reader_rank(c) for c in range(4)]
    assert [CUBE.data_coordinate(rank) for rank in readers] == [0, 1, 2, 3]
    assert all(CUBE.counts_tokens(rank) for rank in readers)


def test_experts_fold_over_neighbouring_data_ranks():
    layout = Layout(replicate=2, shard=4, tensor=2, expert=4)
    assert layout.ranks == 16
    assert layout.group(0, "expert") == [0, 2, 4, 6]
    assert layout.group(9, "expert") == [9, 11, 13, 15]


def test_sharding_without_a_degree_divides_the_replicas():
    assert Layout.from_config(LayoutConfig(replicate=4, shard="parameters")) == Layout(shard=4)
    assert Layout.from_config(LayoutConfig(replicate=2, shard="optimizer", shard_degree=4)) == Layout(
        replicate=2, shard=4
    )
    assert Layout.from_config(LayoutConfig(replicate=2, tensor=2)) == Layout(replicate=2, tensor=2)


@pytest.mark.parametrize(
    ("words", "ranks", "layout"),
    [
        ([], 4, Layout(replicate=4)),
        (["--layout.shard=zero-3"], 4, Layout(shard=4)),
        (["--layout.tensor=2"], 4, Layout(replicate=2, tensor=2)),
        (["--layout.shard=zero-1", "--layout.shard_degree=2", "--layout.tensor=2"], 8, Layout(1, 2, 2, 1, 2)),
    ],
)
def test_ranks_decide_how_many_copies_there_are(words, ranks, layout):
    assert Layout.from_config(load_config(overrides=words, ranks=ranks).layout) == layout


def test_ranks_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"6 ranks do not divide over tensor 4; allowed: 4 or 8 ranks"):
        load_config(overrides=["--layout.tensor=4"], ranks=6)


EXPERTS = ["--model.experts=4", "--layout.expert=2"]
PIPED = ["--layout.pipeline=2", "--batch.micro=2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout.tensor=3"], "tensor does not divide model.kv_heads.*layout.tensor = 1, 2"),
        (["--layout.tensor=2", "--model.ffn=351"], "tensor does not divide model.ffn.*must divide 351"),
        (["--layout.tensor=2", "--model.vocab=257"], "tensor does not divide model.vocab.*pad it"),
        (["--layout.tensor=2", "--data.sequence=127"], "tensor does not divide data.sequence"),
        (["--layout.context=2", "--data.sequence=126"], "context does not divide data.sequence.*= 124 or 128"),
        (["--layout.context=8", "--context.method=all-to-all"], "does not divide model.heads.*context.method = ring"),
        (["--layout.expert=2"], "expert does not divide model.experts.*layout.expert = 1"),
        (["--layout.expert=3", "--model.experts=4"], "expert does not divide model.experts.*layout.expert = 1, 2, 4"),
        (["--layout.expert=4", "--model.experts=4"], "ranks that it folds over.*= 1, 2 .it must divide replicate x"),
        (["--layout.pipeline=8"], "more stages of a pipeline than blocks.*at most 4"),
        ([*PIPED, "--layout.shard=zero-2"], "pipeline with shard = gradients.*optimizer or parameters"),
        ([*PIPED, "--pipeline.schedule=zbv", "--compile.enabled=true"], "nothing would be deferred.*compile = false"),
        (
            [*PIPED, "--pipeline.schedule=zbv", "--activation_checkpoint.mode=full"],
            "every group of its weights.*= none",
        ),
        (
            [*EXPERTS, "--activation_checkpoint.mode=selective"],
            "activation_checkpoint.mode = selective with expert.*none or full",
        ),
        (
            [*EXPERTS, "--layout.shard=zero-3", "--fsdp.reshard_after_forward=2"],
            "fsdp.reshard_after_forward does not divide.*fsdp.reshard_after_forward = true, false",
        ),
        (
            ["--layout.shard=zero-3", "--layout.tensor=2", "--fsdp.reshard_after_forward=2"],
            "fsdp.reshard_after_forward of several ranks.*true or false",
        ),
        (
            [*PIPED, "--pipeline.schedule=zbv", "--layout.shard=zero-3"],
            "has let go of them.*fsdp.reshard_after_forward = false",
        ),
        ([*PIPED, "--pipeline.schedule=zbv", "--pipeline.stages=1"], "zbv cannot have 1 stages a rank; allowed: 2"),
        (
            ["--layout.pipeline=2"],
            "cannot fill its stages with 1 micro-batches; allowed: 2.*batch.micro = 12",
        ),
        (["--layout.shard=zero-3", "--ddp.static_graph=true"], "promise to DDP.*static_graph = false"),
        (["--layout.tensor=2", "--ddp.comm_hook=bf16_compress"], "rounds once.*ddp.comm_hook = none"),
        (
            ["--layout.shard=zero-3", "--layout.replicate=4", "--fsdp.reshard_after_forward=3"],
            "fsdp.reshard_after_forward = true, false, 2, 4",
        ),
        (["--layout.shard=zero-3", "--layout.shard_degree=1"], "divides nothing"),
        (
            ["--activation_checkpoint.segment=2"],
            "activation_checkpoint.segment without.*activation_checkpoint.mode = full",
        ),
        (["--layout.shard_degree=2"], "layout.shard_degree = 2 with layout.shard = none"),
        (["--layout.shard=zero-4"], "layout.shard = zero-4 is not known.*none, optimizer, gradients, parameters"),
    ],
)
def test_what_is_impossible_is_refused_with_what_is_possible(words, said):
    with pytest.raises(ConfigError, match=said):
        validate(load_config(overrides=["--batch.global=24", *words]))


def test_the_table_says_of_every_refusal_why():
    assert len({rule.combination for rule in UNSUPPORTED}) == len(UNSUPPORTED)
    assert all(rule.reason and not rule.alternative(Layout(replicate=2), load_config()) for rule in UNSUPPORTED)


def test_a_users_own_model_brings_its_own_cuts():
    config = load_config(overrides=["--layout.tensor=3", "--layout.replicate=1"])
    assert validate(config, own_model=True)[0].tensor == 3


def test_the_documentation_has_the_table_of_what_is_refused():
    text = (Path(__file__).parents[1] / "docs" / "layouts.md").read_text()
    assert all(f"| {rule.combination} | {rule.reason} |" in text for rule in UNSUPPORTED)
