"""Unsupported combinations: every message names the combination, the reason and an alternative."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.base.config import load_config
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import UNSUPPORTED, validate
from meshwright.errors import ConfigError

EXPERTS = ["--model.experts=4", "--layout.expert=2"]
PIPELINE = ["--layout.pipeline=2", "--batch.micro=2"]
ZBV = [*PIPELINE, "--pipeline.schedule=zbv"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--layout.tensor=3"], "layout.tensor does not divide model.kv_heads.*try layout.tensor = 1, 2"),
        (["--layout.tensor=2", "--model.ffn=351"], "layout.tensor does not divide model.ffn.*must divide 351"),
        (["--layout.tensor=2", "--model.vocab=257"], "layout.tensor does not divide model.vocab.*pad the vocabulary"),
        (["--layout.tensor=2", "--data.sequence=127"], "layout.tensor does not divide data.sequence"),
        (["--layout.context=2", "--data.sequence=126"], "layout.context does not divide data.sequence.*= 124 or 128"),
        (
            ["--layout.context=8", "--context.method=all-to-all"],
            "does not divide model.heads.*try context.method = ring",
        ),
        (["--layout.expert=2"], "layout.expert does not divide model.experts.*try layout.expert = 1"),
        (["--layout.expert=3", "--model.experts=4"], "layout.expert does not divide model.experts.*= 1, 2, 4"),
        (
            ["--layout.expert=4", "--model.experts=4"],
            "ranks that it reuses.*= 1, 2 .it must divide replicate x context",
        ),
        (["--layout.pipeline=8"], "more pipeline stages than blocks.*at most 4"),
        ([*PIPELINE, "--layout.shard=zero-2"], "pipeline with layout.shard = gradients.*optimizer or parameters"),
        ([*ZBV, "--compile.enabled=true"], "nothing is deferred.*try compile.enabled = false, or pipeline.schedule"),
        ([*ZBV, "--activation_checkpoint.mode=full"], "recomputed.*try activation_checkpoint.mode = none, or"),
        ([*EXPERTS, "--activation_checkpoint.mode=selective"], "= selective with layout.expert.*none or full"),
        (
            [*EXPERTS, "--layout.shard=zero-3", "--fsdp.reshard_after_forward=2"],
            "fsdp.reshard_after_forward does not divide.*fsdp.reshard_after_forward = true, false",
        ),
        (
            ["--layout.shard=zero-3", "--layout.tensor=2", "--fsdp.reshard_after_forward=2"],
            "fsdp.reshard_after_forward = N with pipeline or tensor.*true or false",
        ),
        ([*ZBV, "--layout.shard=zero-3"], "FSDP2 has resharded them.*fsdp.reshard_after_forward = false"),
        ([*ZBV, "--pipeline.stages=1"], "zbv does not support 1 stages per rank; expected 2 .*batch.micro = 2\\)$"),
        (
            ["--layout.pipeline=2"],
            "cannot fill its stages with 1 micro-batches; expected 2.*batch.micro = 12; try --batch.micro=6",
        ),
        (["--layout.shard=zero-3", "--ddp.static_graph=true"], "static_graph with FSDP2.*try ddp.static_graph = false"),
        (["--layout.tensor=2", "--ddp.comm_hook=bf16_compress"], "comm_hook with FSDP2.*try ddp.comm_hook = none"),
        (["--ddp.static_graph=true", "--batch.micro=1"], "12 accumulation steps.*try ddp.static_graph = false"),
        (
            ["--layout.shard=zero-3", "--layout.replicate=4", "--fsdp.reshard_after_forward=3"],
            "fsdp.reshard_after_forward = true, false, 2, 4",
        ),
        (["--activation_checkpoint.segment=2"], "activation_checkpoint.segment without.*or activation_checkpoint.mode"),
        (
            ["--activation_checkpoint.mode=full", "--activation_checkpoint.memory_budget=0.5"],
            "both say what a block keeps for backward.*try activation_checkpoint.mode = none",
        ),
        (["--activation_checkpoint.offload=true"], "try activation_checkpoint.mode = full, or .*offload = false"),
        (
            ["--activation_checkpoint.offload=true", "--activation_checkpoint.mode=full", "--compile.scope=model"],
            "no block inputs.*try compile.scope = block",
        ),
        (["--layout.shard=zero-3", "--layout.shard_degree=1"], "layout.shard_degree = 1"),
        (["--layout.shard_degree=2"], "layout.shard_degree = 2"),
        (
            ["--batch.global=16777216", "--batch.micro=1", "--layout.replicate=1", "--layout.pipeline=2"],
            "33,554,432 forward passes per step over all stages; expected at most 1,048,576",
        ),
        (["--layout.shard=zero-4"], "layout.shard = zero-4.*none, optimizer, gradients, parameters"),
    ],
)
def test_unsupported_combination_names_an_alternative(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(load_config(overrides=["--batch.global=24", *overrides]))


def test_every_unsupported_combination_has_a_reason_and_none_applies_to_the_default_layout():
    assert len({rule.combination for rule in UNSUPPORTED}) == len(UNSUPPORTED)
    assert all(rule.reason and not rule.alternative(Layout(replicate=2), load_config()) for rule in UNSUPPORTED)


def test_own_model_brings_its_own_tensor_parallel_plan():
    config = load_config(overrides=["--layout.tensor=3", "--layout.replicate=1"])
    assert validate(config, own_model=True)[0].tensor == 3


def test_documentation_has_the_table_of_unsupported_combinations():
    text = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()
    section = text.split("## Unsupported combinations")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    documented = [row for row in rows if row[0] not in ("combination", "---")]
    assert documented == [(rule.combination, rule.reason) for rule in UNSUPPORTED]
