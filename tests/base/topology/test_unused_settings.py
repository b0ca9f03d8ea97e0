"""Settings without an effect are reported: settings of unused axes, and those that another setting switches off."""

from __future__ import annotations

import re

import pytest

from meshwright import train
from meshwright.base.cli import main
from meshwright.base.config import load_config
from meshwright.base.config.presets import PRESETS
from meshwright.base.records.events import read_events
from meshwright.base.topology.unused_settings import (
    UNUSED_SETTINGS,
    changed_settings,
    require_data_settings,
    unused_settings,
)
from meshwright.errors import ConfigError
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
        (["--rl.group_size=4"], ["rl.group_size = 4 has no effect: rl.objective = none"]),
        (
            ["--rl.objective=policy_gradient", "--rl.clip=0.3"],
            ["rl.clip = 0.3 has no effect: rl.objective = policy_gradient"],
        ),
        (["--lora.alpha=3"], ["lora.alpha = 3.0 has no effect: lora.rank = 0"]),
        (["--early_stopping.mode=max"], ["early_stopping.mode = max has no effect: early_stopping.patience = 0"]),
        (["--profile.shapes=true"], ["profile.shapes = true has no effect: profile.steps is empty"]),
        (["--checkpoint.best=max"], ["checkpoint.best = max has no effect: checkpoint.keep_best is empty"]),
        (["--trackers.every=3"], ["trackers.every = 3 has no effect: no tracker is on"]),
        (["--metrics.host=::1"], ["metrics.host = ::1 has no effect: metrics.port = 0"]),
        (["--launch.preflight=check"], ["launch.preflight = check has no effect: launch.hosts = 1"]),
        (
            ["--checkpoint.mode=off", "--checkpoint.keep=7"],
            ["checkpoint.keep = 7 has no effect: checkpoint.mode = off"],
        ),
    ],
)
def test_settings_without_effect_are_noted(overrides, notes):
    assert unused_settings(load_config(overrides=overrides)) == notes


MIXTURE = """--data.mixture=[{kind = "text", path = "a"}]"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--data.path=a.txt"],
            "data.path = a.txt has no effect: data.kind is stdlib; try data.kind = tokens or text or jsonl or chat or "
            "shards, or without data.path",
        ),
        (
            ["--data.kind=text", "--data.path=a", "--data.samples=3"],
            "data.samples = 3 has no effect: data.kind is text; try data.kind = synthetic, or without data.samples",
        ),
        (["--data.tokenizer=t.json"], "data.tokenizer = t.json has no effect: data.kind is stdlib; try data.kind ="),
        (
            [MIXTURE, "--data.path=b"],
            "data.path = b has no effect: data.mixture names the sources; try without data.path",
        ),
        ([MIXTURE, "--data.kind=synthetic"], "data.kind = synthetic has no effect: data.mixture names the sources"),
        (["--data.weight=2"], "data.weight = 2.0 has no effect: it is that of a source in data.mixture"),
        (
            [MIXTURE.replace("}", ", samples = 3}")],
            "data.mixture[0].samples = 3 has no effect: its kind is text; try data.mixture[0].kind = synthetic, or",
        ),
        ([MIXTURE, "--data.tokenizer=t.json", "--data.end_of_document=none"], None),
        (["--data.kind=tokens", "--data.path=a", "--data.tokenizer=t.json"], None),
        (["--data.kind=shards", "--data.path=a", "--data.packing=false", "--data.shard_cache=9"], None),
        (["--data.tokenizer=bytes"], None),
        (
            ["--rl.objective=grpo", "--data.path=a", "--data.kind=text"],
            "data.path = a has no effect: rl.objective = grpo trains on prompts; try without data.path",
        ),
        (["--rl.objective=grpo", "--data.kind=synthetic", "--data.tokenizer=t.json"], None),
        (["--data.kind=synthetic", "--data.samples=3", "--data.kind=text", "--data.path=a"], None),
    ],
)
def test_data_settings_without_effect_are_refused(overrides, message):
    config = load_config(overrides=overrides)
    if message is None:
        require_data_settings(config)
    else:
        with pytest.raises(ConfigError, match=re.escape(message)):
            require_data_settings(config)


def test_a_run_that_has_begun_keeps_its_settings_without_effect_except_files():
    require_data_settings(load_config(overrides=["--data.samples=3"]), begun=True)
    with pytest.raises(ConfigError, match=r"data.path = a has no effect"):
        require_data_settings(load_config(overrides=["--data.path=a"]), begun=True)


def test_a_kind_on_the_command_line_replaces_the_source_of_the_run_file(tmp_path):
    (tmp_path / "run.toml").write_text('[data]\nkind = "chat"\npath = "a"\npacking = false\nsequence = 16\n')
    data = load_config(tmp_path / "run.toml", ["--data.kind=text", "--data.path=b"]).data
    assert (data.kind, data.path, data.packing, data.sequence) == ("text", "b", True, 16)
    assert load_config(tmp_path / "run.toml", ["--data.kind=jsonl"]).data.path == "a"
    (tmp_path / "run.toml").write_text('[[data.mixture]]\nkind = "synthetic"\n')
    assert load_config(tmp_path / "run.toml", ["--data.kind=text", "--data.path=b"]).data.mixture == ()


def test_train_refuses_a_path_that_the_data_does_not_read(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--run", str(tmp_path / "run"), "--data.path=a.txt", "--launch.device=cpu"])
    [message] = capsys.readouterr().err.strip().splitlines()
    assert "data.path = a.txt has no effect: data.kind is stdlib" in message
    assert not (tmp_path / "run" / "run.toml").exists()


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
