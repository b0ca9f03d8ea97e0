"""Whole runs: equal losses on any number of ranks and workers, equal bits when repeated, and complete records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from meshwright import train
from meshwright.base.config import (
    BatchConfig,
    DDPConfig,
    EvalConfig,
    LayoutConfig,
    PrecisionConfig,
    RunConfig,
)
from meshwright.base.records.events import read_events
from meshwright.base.records.phases import STEP_PHASES
from meshwright.core.trainer.loop import Training
from meshwright.errors import ConfigError, DataError, IdentityError
from tests.kit.custom_model import custom_config, custom_model, run, run_custom


def test_losses_are_equal_on_1_2_and_4_ranks_with_0_and_3_data_workers(tmp_path, small):
    curves = {}
    for ranks in (1, 2, 4):
        for workers in (0, 3):
            config = small(f"--data.workers={workers}", "--precision.compute=fp64", "--batch.micro=2", ranks=ranks)
            _, steps = run(tmp_path / f"{ranks}-{workers}", config)
            assert [e["step"] for e in steps] == list(range(6))
            curves[ranks, workers] = [(e["loss"], e["grad_norm"]) for e in steps]
    first = curves[1, 0]
    assert len({loss for loss, _ in first}) == 6
    for curve in curves.values():
        assert np.allclose(curve, first, rtol=1e-10)
    assert curves[2, 0] == curves[2, 3]
    assert curves[4, 0] == curves[4, 3]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_runs_of_one_config_are_bitwise_equal(tmp_path, small, ranks):
    config = small("--batch.micro=2", ranks=ranks)
    (first, curve), (second, repeated) = (run(tmp_path / name, config) for name in "ab")
    assert first.parameters_digest == second.parameters_digest
    assert [(e["loss"], e["grad_norm"], e["lr"], e["tokens"]) for e in curve] == [
        (e["loss"], e["grad_norm"], e["lr"], e["tokens"]) for e in repeated
    ]


def test_every_rank_writes_the_documented_events_and_step_record_keys(tmp_path, small):
    run(tmp_path / "r", small("--eval.every=3"))
    for rank in (0, 1):
        events = list(read_events(tmp_path / "r" / "events" / f"rank-0000{rank}.jsonl"))
        expected = ["start", "step", "step", "counters", "step", "eval", "step", "step", "step", "eval"]
        assert [e["kind"] for e in events] == [*expected, "checkpoint", "end"]
        step = events[2]
        keys = {"kind", "attempt", "rank", "step", "loss", "grad_norm", "lr", "tokens", "samples", "phases"}
        assert step.keys() >= keys
        values = (step["rank"], step["attempt"], step["step"], step["samples"], step["tokens"])
        assert values == (rank, 1, 1, 16, 16 * 16)
        assert step["phases"].keys() == set(STEP_PHASES)
        assert step["communication"]["exposed_seconds"] == step["phases"]["sync"]
        assert step["communication"]["message_bytes"] > 0
        assert step["noise_scale"] is None or step["noise_scale"] > 0
        assert sum(step["phases"].values()) <= step["seconds"] * 1.5


def test_evaluation_loss_is_averaged_over_tokens_and_equal_on_any_number_of_ranks(tmp_path, small):
    losses = {}
    for ranks in (1, 2, 4):
        config = small(
            "--precision.compute=fp64", "--eval.every=2", "--eval.samples=7", "--eval.holdout=0.1", ranks=ranks
        )
        result, _ = run(tmp_path / str(ranks), config)
        losses[ranks] = [loss for _, loss in result.evaluations]
        assert [step for step, _ in result.evaluations] == [1, 3, 5]
    assert np.allclose(losses[2], losses[1], rtol=1e-10)
    assert np.allclose(losses[4], losses[1], rtol=1e-10)


def test_custom_model_is_trained_in_place_on_any_number_of_ranks(tmp_path):
    trained = {}
    for ranks in (1, 2, 4):
        model = custom_model().double()
        before = model[0].weight.clone()
        config = custom_config(ranks=ranks, precision=PrecisionConfig(compute="fp64"))
        result, _ = run_custom(tmp_path / str(ranks), config, model=model)
        assert result.steps == 4
        assert not torch.equal(before, model[0].weight)
        trained[ranks] = model[0].weight.detach().clone()
    assert torch.allclose(trained[1], trained[2], rtol=1e-10)
    assert torch.allclose(trained[1], trained[4], rtol=1e-10)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precision_trains(tmp_path, small, compute):
    config = small(
        f"--precision.compute={compute}",
        "--model.width=16",
        "--model.heads=2",
        "--data.sequence=4",
        "--optimizer.lr=0.01",
        steps=8,
    )
    result, steps = run(tmp_path / "r", config)
    assert all(e["loss"] for e in steps)
    if compute == "fp16":
        assert steps[-1]["loss_scale"] > 0


def test_fp16_lowers_its_loss_scale_by_skipping_steps(tmp_path, small):
    config = small(
        "--precision.compute=fp16",
        "--precision.loss_scale=1e12",
        "--model.width=16",
        "--model.heads=2",
        "--data.sequence=4",
        steps=30,
    )
    result, steps = run(tmp_path / "r", config)
    assert 0 < result.skipped < 30
    assert not steps[-1].get("skipped")
    assert steps[0]["loss_scale"] > steps[-1]["loss_scale"]


def test_identity_mismatch_shows_both_values_and_fresh_sets_the_old_run_aside(tmp_path, small):
    run(tmp_path / "r", small(steps=1))
    with pytest.raises(IdentityError, match="seed was 0 and is 5"):
        run(tmp_path / "r", small("--seed=5", steps=1))
    train(small("--seed=5", steps=1), run=tmp_path / "r", fresh=True, quiet=True)
    assert (tmp_path / "r.old-1" / "run.toml").exists()


def test_run_resumes_on_another_layout(tmp_path, small):
    run(tmp_path / "r", small(steps=1))
    run(tmp_path / "r", small(steps=1, ranks=1))
    starts = [e for e in read_events(tmp_path / "r" / "events" / "rank-00000.jsonl") if e["kind"] == "start"]
    assert [(e["attempt"], e["ranks"]) for e in starts] == [(1, 2), (2, 1)]


def test_run_of_zero_steps_completes(tmp_path, small):
    result, steps = run(tmp_path / "r", small(steps=0))
    assert (result.steps, result.loss, steps) == (0, None, [])


def test_empty_source_is_named(tmp_path):
    with pytest.raises(DataError, match="source list is empty"):
        run_custom(tmp_path / "r", custom_config(), source=[])


class LinearAfterBatchNorm(nn.Module):
    """A model with batch norm, which counts its forward passes in training mode."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.linear(self.norm(x))


def test_evaluation_restores_the_training_mode_of_each_module(tmp_path):
    model = LinearAfterBatchNorm()
    model.norm.eval()
    config = custom_config(steps=6, eval=EvalConfig(holdout=0.2, every=2, samples=4))
    run_custom(tmp_path / "r", config, model=model)
    assert int(model.norm.num_batches_tracked) == 0


def test_find_unused_parameters_allows_a_parameter_without_gradient(tmp_path):
    model = custom_model()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    result, _ = run_custom(tmp_path / "r", custom_config(ddp=DDPConfig(find_unused_parameters=True)), model=model)
    assert result.steps == 4


@pytest.mark.parametrize("item", [(None, 1), ("text", 1)])
def test_item_that_is_not_numeric_is_named_by_its_sample(tmp_path, item):
    with pytest.raises(DataError, match="cannot be decoded: ValueError"):
        run_custom(tmp_path / "r", custom_config(), source=[item] * 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1},
        {"seed": "x"},
        {"preset": "nope"},
        {"log_every": 0},
        {"batch": BatchConfig(0)},
        {"layout": LayoutConfig(0)},
    ],
)
def test_run_config_built_in_python_is_validated_like_a_file(tmp_path, wrong):
    with pytest.raises(ConfigError):
        train(RunConfig(**wrong), run=tmp_path / "r", quiet=True)


def test_data_file_that_changes_during_the_run_stops_it_before_the_next_checkpoint(tmp_path, small, monkeypatch):
    file, real = tmp_path / "tokens", Training.run_step
    np.arange(20_000, dtype=np.uint16).astype(np.uint8).astype(np.uint16).tofile(file)

    def run_step(training):
        real(training)
        if training.done == 3 and training.world.rank == 0:
            with file.open("r+b") as opened:
                opened.write(b"\7")

    monkeypatch.setattr(Training, "run_step", run_step)
    data = ("--data.kind=tokens", f"--data.path={file}")
    saves = ("--checkpoint.mode=sync", "--checkpoint.every=2", "--checkpoint.seconds=0")
    with pytest.raises(DataError, match=r"data file .*/tokens changed during the run") as error:
        train(small(*data, *saves, steps=8), run=tmp_path / "run", quiet=True)
    assert error.value.exit_code == 6
    published = {path.parent.name for path in (tmp_path / "run" / "checkpoints").glob("*/manifest.json")}
    assert published == {"step-00000002.a0001"}
