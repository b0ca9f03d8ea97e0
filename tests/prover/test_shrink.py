"""The proof runs of a config: valid, complete in their changes, and together covering every axis of the layout."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from meshwright.config import PRESETS, fingerprint, identity, load_config
from meshwright.config.fingerprint import flatten
from meshwright.prover.shrink import not_proven, proof_runs
from meshwright.prover.shrink.layouts import MAX_RANKS, MAX_RANKS_AFTER_RESUME
from meshwright.prover.shrink.sizes import FULL_ACCUMULATION, user_accumulation
from meshwright.simulator.fake_ddp import MIB, bucket_counts
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.parameter_shapes import decoder_parameter_shapes
from meshwright.topology.parameter_shards import uses_ddp
from meshwright.topology.schedules import find_schedule
from meshwright.topology.stage_partition import partition_blocks
from meshwright.topology.unsupported import validate
from tests.hybrid_layouts import HYBRIDS, balanced_config
from tests.prover.valid_configs import valid_configs

SIZES = {
    *("steps", "count_bytes_every", "data.sequence", "data.workers", "batch.global", "batch.micro"),
    *(f"model.{name}" for name in ("vocab", "width", "heads", "kv_heads", "ffn", "experts", "experts_active")),
    *("model.separator", "model.capacity_factor", "schedule.warmup", "schedule.decay", "numerics.compare_every"),
    *("eval.every", "eval.samples", "checkpoint.seconds", "checkpoint.every", "checkpoint.keep", "ddp.bucket_cap_mb"),
    *("launch.restarts", "launch.hang_timeout"),
}
"""The settings that differ in the run "as configured" if the layout has at most eight ranks."""
DEGREES = {
    *("layout.replicate", "layout.shard", "layout.shard_degree", "layout.tensor", "layout.pipeline"),
    *("layout.context", "layout.expert", "fsdp.reshard_after_forward"),
}
"""The settings that differ in addition if the layout has more ranks."""


def named(runs, name):
    return next(run for run in runs if run.name == name)


def check_properties(config):
    """What holds for the proof runs of every valid config."""
    runs = proof_runs(config)
    user, batch = validate(config)
    configured = [run for run in runs if run.name.startswith("as configured")]
    for run in runs:
        check_run(config, run)
    for run in configured:
        allowed = SIZES | (DEGREES if user.ranks > MAX_RANKS else set())
        if config.precision.compute == "fp64":
            allowed |= {"launch.device", "ddp.comm_hook", "checkpoint.mode"}  # the run in float64 is the configured one
        assert changed_keys(config, run.config) <= allowed
        accumulation = validate(run.config)[1].accumulation
        if user.ranks <= MAX_RANKS and batch.accumulation <= FULL_ACCUMULATION:
            assert accumulation == batch.accumulation
        assert accumulation >= min(batch.accumulation, FULL_ACCUMULATION)
        assert stages_per_rank(run.config) == stages_per_rank(config)
        check_buckets(run.config)
    axes = set().union(*(Layout.from_config(run.config.layout).active_axes for run in configured))
    assert axes == set(user.active_axes)
    assert user.ranks > MAX_RANKS or [run.config.layout for run in configured] == [config.layout]
    check_variation(config, [run for run in runs if run.name.startswith("variation")])
    assert all(sentence and not sentence.endswith(".") for sentence in not_proven(config, runs))


def changed_keys(before, after):
    values = {key: value for key, value, _ in flatten(after)}
    return {key for key, value, _ in flatten(before) if values[key] != value}


def check_run(config, run):
    layout, batch = validate(run.config)
    assert 1 <= layout.ranks <= MAX_RANKS
    assert {change.split(" ")[0] for change in run.changes} == changed_keys(config, run.config)
    model, user_model = run.config.model, config.model
    assert bool(model.experts) == bool(user_model.experts)
    if model.experts:
        assert (model.experts > model.experts_active) == (user_model.experts > user_model.experts_active)
        assert model.experts % layout.expert == 0
        if user_model.experts >= 2 * user_model.experts_active:
            assert model.experts >= 2 * model.experts_active
    if run.config.eval.every and layout.data_degree > 1:
        assert run.config.eval.samples % layout.data_degree
    assert run.config.data.workers <= 2
    if run.name != "long sequence":
        assert model.kv_heads >= min(2, user_model.kv_heads)
        ratio = user_model.heads // user_model.kv_heads
        if model.kv_heads * ratio <= 32 and config.context.method == "ring":
            assert model.heads // model.kv_heads == ratio
        if run.config.data.kind == config.data.kind == "stdlib":
            assert run.config.steps >= min(config.steps, 4)
    if run.resume_layout is not None:
        other, _ = validate(run.resume_layout)
        assert other.ranks <= MAX_RANKS_AFTER_RESUME
        assert other != layout
        assert fingerprint(identity(run.resume_layout)) == fingerprint(identity(run.config))
        assert run.config.checkpoint.every < run.config.steps or config.steps < 3
        assert run.config.checkpoint.mode != "off"


def check_buckets(config):
    if uses_ddp(Layout.from_config(config.layout)):
        sizes = [4 * parameter.local_numel() for parameter in decoder_parameter_shapes(config.model)]
        assert len(bucket_counts(sizes[::-1], config.ddp.bucket_cap_mb * MIB)) >= 3


def check_variation(config, runs):
    layouts = [Layout.from_config(run.config.layout) for run in runs]
    assert any(3 in (*layout.degrees, layout.expert) for layout in layouts)
    for run, layout in zip(runs, layouts, strict=True):
        model, schedule = run.config.model, find_schedule(config.pipeline.schedule)
        assert run.masked_labels
        assert model.tie is not config.model.tie
        assert model.separator is not None
        assert run.config.precision.compute == "fp64"
        assert run.config.optimizer.clip == 0.1
        accumulation = validate(run.config)[1].accumulation
        if not config.ddp.static_graph and not schedule.even_rounds and layout.pipeline == 1:
            assert accumulation == (1 if user_accumulation(config) == 3 else 3)
        if layout.pipeline > 1:
            stages = partition_blocks(model, run.config.data.sequence, layout.pipeline * stages_per_rank(config))
            assert len({len(blocks) for blocks in stages}) > 1


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("options", ["", "--layout.replicate=1", "--batch.micro=8"])
def test_proof_runs_of_a_preset(preset, options):
    check_properties(load_config(overrides=[f"--preset={preset}", *options.split()]))


@pytest.mark.parametrize("row", HYBRIDS)
def test_proof_runs_of_a_hybrid_layout(row):
    check_properties(balanced_config(row))


@settings(max_examples=300)
@given(valid_configs())
def test_proof_runs_of_any_valid_config(config):
    check_properties(config)


@settings(max_examples=100)
@given(valid_configs())
def test_full_proof_runs_keep_sizes_that_the_layout_divides(config):
    runs = proof_runs(config, full=True)
    for run in runs:
        validate(run.config)
    layout = Layout.from_config(config.layout)
    if layout.ranks <= MAX_RANKS:
        changed = {change.split()[0] for change in named(runs, "as configured").changes}
        assert {key for key in changed if key.startswith(("model.", "data.seq", "batch", "layout"))} <= {
            "model.capacity_factor"
        }
        assert "long sequence" not in [run.name for run in runs]
