"""Settings without an effect are reported: settings of unused axes, and those that another setting switches off."""

from __future__ import annotations

import pytest

from meshwright import train
from meshwright.base.config import load_config
from meshwright.base.config.presets import PRESETS
from meshwright.base.records.events import read_events
from meshwright.base.topology.unused_settings import UNUSED_SETTINGS, changed_settings, unused_settings
from meshwright.prover.simulator.simulate import simulate


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (["--pipeline.schedule=zbv"], ["pipeline.schedule = zbv has no effect: layout.pipeline = 1"]),
        (["--pipeline.stages=2"], ["pipeline.stages = 2 has no effect: layout.pipeline = 1"]),
        (["--layout.pipeline=2", "--batch.micro=1", "--pipeline.schedule=zbv"], []),
        (["--context.method=all-to-all"], ["context.method = all-to-all has no effect: layout.context = 1"]),
        (["--layout.context=2", "--context.method=all-to-all"], []),
        (["--ddp.bucket_cap_mb=5"], []),
        (
            ["--ddp.bucket_cap_mb=5", "--layout.shard=parameters"],
            ["ddp.bucket_cap_mb = 5.0 has no effect: this layout uses FSDP2 instead of DDP"],
        ),
        (
            ["--ddp.gradient_as_bucket_view=false", "--layout.replicate=1"],
            ["ddp.gradient_as_bucket_view = false has no effect: there is one data-parallel rank"],
        ),
        (["--ddp.find_unused_parameters=true", "--layout.shard=parameters"], []),
        (["--fsdp.prefetch=2"], ["fsdp.prefetch = 2 has no effect: this layout does not use FSDP2"]),
        (["--fsdp.prefetch=2", "--layout.shard=optimizer"], []),
        (
            ["--fsdp.reshard_after_forward=false", "--layout.shard=optimizer"],
            [
                "fsdp.reshard_after_forward = false has no effect: "
                "parameters are not sharded (layout.shard = parameters on two or more ranks)"
            ],
        ),
        (["--fsdp.reshard_after_forward=false", "--layout.shard=parameters"], []),
        (
            ["--layout.shard=parameters", "--layout.replicate=1"],
            ["layout.shard = parameters has no effect: there is one rank to shard over"],
        ),
        (["--model.capacity_factor=1.5"], ["model.capacity_factor = 1.5 has no effect: model.experts = 0"]),
        (["--model.capacity_factor=1.5", "--model.experts=4"], []),
        (["--precision.loss_scale=2"], ["precision.loss_scale = 2.0 has no effect: precision.compute is not fp16"]),
        (["--optimizer.momentum=0.5"], ["optimizer.momentum = 0.5 has no effect: optimizer.kind is adamw"]),
        (["--optimizer.momentum=0.5", "--optimizer.kind=sgd"], []),
        (
            ["--activation_checkpoint.memory_budget=0.5", "--compile.enabled=false"],
            ["activation_checkpoint.memory_budget = 0.5 has no effect: blocks are not compiled"],
        ),
        (["--activation_checkpoint.memory_budget=0.5", "--compile.enabled=true"], []),
        (["--schedule.decay=0.5"], ["schedule.decay = 0.5 has no effect: schedule.kind is not wsd"]),
        (
            ["--checkpoint.mode=off", "--checkpoint.keep=7"],
            ["checkpoint.keep = 7 has no effect: checkpoint.mode = off"],
        ),
    ],
)
def test_settings_without_effect_are_noted(overrides, notes):
    assert unused_settings(load_config(overrides=overrides)) == notes


def test_own_model_ignores_the_model_section():
    config = load_config(overrides=["--model.width=256"])
    assert unused_settings(config) == []
    assert unused_settings(config, own_model=True) == ["model.width = 256 has no effect: the run trains a custom model"]


def test_keys_of_the_table_are_settings():
    config = load_config()
    for rule in UNUSED_SETTINGS:
        for key in rule.keys:
            section, name = key.split(".")
            assert hasattr(getattr(config, section), name)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_unused_settings(preset):
    config = load_config(overrides=[f"--preset={preset}"])
    assert unused_settings(config) == [], changed_settings(config)


def test_simulate_reports_settings_without_an_effect():
    simulation = simulate(load_config(overrides=["--pipeline.schedule=zbv", "--model.layers=1"]))
    assert "pipeline.schedule = zbv has no effect: layout.pipeline = 1" in simulation.notes


def test_start_event_has_settings_without_an_effect(tmp_path):
    config = load_config(
        overrides=[
            "--steps=1",
            "--pipeline.schedule=zbv",
            "--model.layers=1",
            "--layout.replicate=1",
            "--eval.holdout=0",
        ]
    )
    train(config, run=tmp_path / "run", quiet=True)
    [start] = [e for e in read_events(tmp_path / "run" / "events" / "rank-00000.jsonl") if e["kind"] == "start"]
    assert start["notes"] == ["pipeline.schedule = zbv has no effect: layout.pipeline = 1"]
