"""The proof runs of a config: valid, complete in their changes, and together covering every axis of the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.base.config import IGNORE_INDEX, PRESETS, fingerprint, identity
from meshwright.base.config.fingerprint import flatten
from meshwright.base.models.registry import model_spec
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.parameter_shards import uses_ddp
from meshwright.base.topology.schedules import find_schedule, partition_blocks
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.source import SyntheticSource
from meshwright.core.optim.schedule import learning_rate
from meshwright.prover.shrink import estimate_seconds, not_proven, open_proof_sources, proof_runs
from meshwright.prover.shrink.layouts import MAX_RANKS, MAX_RANKS_AFTER_RESUME, pairs, small_layouts
from meshwright.prover.shrink.sizes import FULL_ACCUMULATION, user_accumulation
from meshwright.prover.shrink.source import MaskedSource, ModuloSource
from meshwright.prover.simulator.fake_ddp import MIB, bucket_counts
from tests.kit.hybrid_layouts import HYBRIDS, balanced_config
from tests.kit.small_run import load_cpu_config
from tests.prover.valid_configs import valid_configs

SIZES = {
    *("steps", "count_bytes_every", "data.sequence", "data.workers", "batch.global", "batch.micro"),
    *(f"model.{name}" for name in ("vocab", "width", "heads", "kv_heads", "ffn", "experts", "experts_active")),
    *("model.separator", "model.capacity_factor", "schedule.warmup", "schedule.decay", "numerics.compare_every"),
    *("eval.every", "eval.samples", "checkpoint.seconds", "checkpoint.every", "checkpoint.keep", "ddp.bucket_cap_mb"),
    *("launch.restarts", "launch.hang_timeout", "launch.device"),
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
        if config.precision.compute == "fp16":
            allowed |= {"precision.scale_interval", "numerics.on_nonfinite", "numerics.skip_budget"}
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
    if run.name not in ("long sequence", "last steps"):
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
        assert run.resume_layout.launch.device == "cpu" or config.precision.compute == "fp64"


def check_buckets(config):
    if uses_ddp(Layout.from_config(config.layout)):
        sizes = [4 * parameter.local_numel() for parameter in model_spec(config.model).parameters]
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
            stages = partition_blocks(
                model_spec(model).block_costs(run.config.data.sequence), layout.pipeline * stages_per_rank(config)
            )
            assert len({len(blocks) for blocks in stages}) > 1


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("options", ["", "--layout.replicate=1", "--batch.micro=8"])
def test_proof_runs_of_a_preset(preset, options):
    check_properties(load_cpu_config(overrides=[f"--preset={preset}", *options.split()]))


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


def test_changes_name_the_setting_and_both_values():
    config = load_cpu_config(overrides=["--preset=llama-8b", "--checkpoint.mode=off", "--layout.replicate=1"])
    runs = proof_runs(config)
    changes = named(runs, "float64").changes
    assert {"model.width 4096 to 64", "model.heads 32 to 8", "precision.compute bf16 to fp64"} <= set(changes)
    assert {"checkpoint.mode off to sync", "launch.device auto to cpu", "checkpoint.seconds 300.0 to 0.0"} <= set(
        changes
    )
    assert "model.separator unset to 0" in named(runs, "variation").changes


def test_a_layout_of_many_axes_is_proven_on_several_layouts_that_cover_every_pair():
    options = "--layout.replicate=2 --layout.shard=parameters --layout.shard_degree=8 --layout.pipeline=16"
    options += " --layout.context=8 --layout.tensor=8 --batch.micro=1"
    config = load_cpu_config(overrides=["--preset=llama-405b", *options.split()])
    layouts = small_layouts(config.layout)
    assert set().union(*map(pairs, layouts)) == pairs(config.layout)
    assert [Layout.from_config(layout).ranks for layout in layouts] == [8, 8, 8, 8]
    names = [run.name for run in proof_runs(config)]
    assert len(set(names)) == len(names)
    assert "float64 on replicate 2 x shard 2 x tensor 2" in names
    sentences = not_proven(config, proof_runs(config))
    assert "tensor parallelism of degree 8 (proven with degree 2)" in sentences
    assert "128 micro-batches per step (proven with 32)" in sentences
    assert not any("in one layout" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--layout.expert=8 --layout.replicate=16 --layout.shard=parameters", Layout(shard=4, expert=2)),
        ("--layout.expert=16 --layout.replicate=16 --layout.shard=parameters", Layout(shard=4, expert=4)),
        ("--layout.expert=8 --layout.replicate=8 --layout.tensor=4", Layout(replicate=2, tensor=2, expert=2)),
        ("--layout.expert=4 --layout.replicate=8 --layout.tensor=4", Layout(replicate=4, tensor=2, expert=2)),
    ],
)
def test_a_small_layout_keeps_several_groups_of_experts_if_the_user_has_them(options, expected):
    config = load_cpu_config(overrides=["--preset=mixtral-8x7b", "--model.experts=16", *options.split()])
    assert [Layout.from_config(layout) for layout in small_layouts(config.layout)] == [expected]


def test_the_number_of_micro_batches_is_the_users_even_beyond_eight_if_time_allows_it():
    few_blocks = load_cpu_config(overrides=["--batch.micro=1", "--batch.global=80"])
    assert validate(proof_runs(few_blocks)[0].config)[1].accumulation == 40
    many_blocks = load_cpu_config(overrides=["--batch.micro=1", "--batch.global=4096", "--model.layers=100"])
    assert FULL_ACCUMULATION < validate(proof_runs(many_blocks)[0].config)[1].accumulation < 2048


def test_a_sequence_beyond_the_limit_is_proven_with_full_only():
    config = load_cpu_config(overrides=["--data.sequence=32768", "--layout.replicate=1", "--layout.context=2"])
    runs = proof_runs(config)
    assert named(runs, "long sequence").config.data.sequence == 16384
    assert "data.sequence = 32,768 (proven up to 16,384)" in not_proven(config, runs)
    runs = proof_runs(config, full=True)
    assert runs[0].config.data.sequence == 32768
    assert not_proven(config, runs, devices=8) == []


def test_every_phase_of_the_schedule_is_passed_through():
    for kind in ("cosine", "linear", "wsd"):
        runs = proof_runs(load_cpu_config(overrides=[f"--schedule.kind={kind}"]))
        for config in (runs[0].config, named(runs, "variation").config):
            rates = [learning_rate(step, config.steps, 1.0, config.schedule) for step in range(config.steps)]
            assert rates[:3] == [0.5, 1.0, 1.0]
            assert rates[-1] == pytest.approx(config.schedule.floor)
        between = rates[3:-1]
        assert {"cosine": between != pytest.approx([0.7, 0.4]), "linear": between == pytest.approx([0.7, 0.4])}.get(
            kind, between == [1.0, 1.0]
        )


def test_a_run_in_float64_is_proven_once_and_resumed_from_its_own_checkpoint():
    runs = proof_runs(load_cpu_config(overrides=["--precision.compute=fp64"]))
    assert [run.name for run in runs] == ["as configured", "variation", "last steps", "long sequence", "another layout"]
    assert runs[-1].config == runs[0].config


def test_the_resumed_run_is_one_of_the_other_runs():
    for options in (
        "--checkpoint.mode=off",
        "--precision.compute=fp64",
        "--checkpoint.mode=off --precision.compute=fp64",
    ):
        runs = proof_runs(load_cpu_config(overrides=options.split()))
        assert runs[-1].config in [run.config for run in runs[:-1]]


def test_dropped_tokens_are_proven_on_layouts_that_keep_sequences_whole():
    options = ["--model.experts=8", "--model.capacity_factor=1.25"]
    config = load_cpu_config(overrides=options)
    runs = proof_runs(config)
    assert runs[0].config.model.capacity_factor == 1.25
    assert all(run.resume_layout is None for run in runs)
    assert any("resume on another layout" in sentence for sentence in not_proven(config, runs))
    config = load_cpu_config(overrides=[*options, "--layout.replicate=1", "--layout.tensor=2"])
    runs = proof_runs(config)
    assert "model.capacity_factor 1.25 to 0.0" in runs[0].changes
    assert "model.capacity_factor with context or tensor parallelism" in not_proven(config, runs)


def test_ranks_of_proof_runs_share_the_devices_of_the_machine():
    config = load_cpu_config(overrides=["--layout.shard=parameters", "--layout.replicate=4", "--layout.tensor=2"])
    runs = proof_runs(config, devices=1)
    assert [validate(named(runs, name).config)[0].ranks for name in ("as configured", "on the device")] == [8, 4]
    assert {named(runs, name).config.launch.device for name in ("as configured", "on the device")} == {"auto"}
    assert named(runs, "float64").config.launch.device == "cpu"


def test_token_ids_are_taken_modulo_the_small_vocabulary():
    config = load_cpu_config(overrides=["--model.vocab=50000", "--data.kind=synthetic", "--model.separator=4711"])
    run = proof_runs(config)[0]
    [source] = open_proof_sources(config, run.config, run.masked_labels)
    [reference] = [SyntheticSource(len(source), run.config.data.sequence, 50000)]
    tokens, labels = source[7]
    assert np.array_equal(tokens, reference[7][0] % run.config.model.vocab)
    assert np.array_equal(tokens[1:], labels[:-1])
    assert run.config.model.separator == 4711 % run.config.model.vocab
    assert source.fingerprint() != ModuloSource(source.source, 17).fingerprint()


def test_masked_labels_have_a_different_number_of_valid_tokens_in_every_sample():
    source = MaskedSource(SyntheticSource(100, 24, 1000), 31, separator=5)
    valid = {int((source[index][1] != IGNORE_INDEX).sum()) for index in range(100)}
    assert len(valid) > 12
    assert np.mean([(source[index][0] == 5).mean() for index in range(100)]) == pytest.approx(1 / 6, rel=0.3)
    assert all(np.array_equal(*arrays) for arrays in zip(source[3], source[3], strict=True))


def test_estimate_grows_with_blocks_and_micro_batches():
    small, large = (load_cpu_config(overrides=[f"--model.layers={n}", "--batch.micro=1"]) for n in (4, 40))
    assert 5 < estimate_seconds(proof_runs(small)) < 60
    assert estimate_seconds(proof_runs(large)) > 2 * estimate_seconds(proof_runs(small))


def test_last_steps_have_the_counts_of_the_run():
    options = ("--model.vocab=3000", "--model.experts=32", "--batch.micro=4", "--eval.samples=40")
    config = load_cpu_config(overrides=["--data.kind=synthetic", "--layout.replicate=1", *options])
    run = named(proof_runs(config), "last steps")
    assert (run.config.model.vocab, run.config.model.experts, run.config.batch.micro) == (3000, 32, 4)
    assert run.config.eval.samples == 40


def test_sizes_beyond_those_of_all_runs_are_not_proven():
    config = load_cpu_config(overrides=["--data.kind=synthetic", "--model.vocab=128256", "--model.experts=128"])
    missing = not_proven(config, proof_runs(config))
    assert "model.vocab = 128,256 (proven up to 70,000)" in missing
    assert "model.experts = 128 (proven up to 64)" in missing


def test_proof_runs_do_not_read_initial_weights():
    config = load_cpu_config(overrides=["--data.kind=synthetic", "--init_from=/weights"])
    runs = proof_runs(config)
    assert {run.config.init_from for run in runs} == {""}
    assert "init_from /weights to unset" in runs[0].changes
    assert any("training from the weights of init_from" in sentence for sentence in not_proven(config, runs))


def test_loss_scale_of_fp16_halves_and_doubles_in_a_proof_run():
    config = load_cpu_config(overrides=["--data.kind=synthetic", "--precision.compute=fp16"])
    configured = named(proof_runs(config), "as configured").config
    assert configured.precision.scale_interval == 2
    assert configured.numerics.on_nonfinite == "skip"
    assert configured.steps == 5
