"""Whole runs: the same on any ranks and workers, bitwise the same again, and every policy kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from meshwright import train
from meshwright.config import (
    BatchConfig,
    DataConfig,
    DDPConfig,
    EvalConfig,
    LaunchConfig,
    LayoutConfig,
    NumericsConfig,
    RunConfig,
)
from meshwright.errors import ConfigError, DataError, IdentityError
from meshwright.recover.failures import RanksFailed
from meshwright.telemetry.events import read_events
from meshwright.trainer.numerics import NoiseScale


def run(folder, config, **own):
    result = train(config, run=folder, quiet=True, **own)
    return result, [e for e in read_events(folder / "events" / "rank-00000.jsonl") if e["kind"] == "step"]


def test_the_same_run_on_1_2_and_4_ranks_with_0_and_3_workers_has_the_same_losses(tmp_path, small):
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
def test_two_runs_of_one_config_are_bitwise_the_same(tmp_path, small, ranks):
    config = small("--batch.micro=2", ranks=ranks)
    (one, curve), (two, again) = (run(tmp_path / name, config) for name in "ab")
    assert one.parameters_digest == two.parameters_digest
    assert [(e["loss"], e["grad_norm"], e["lr"], e["tokens"]) for e in curve] == [
        (e["loss"], e["grad_norm"], e["lr"], e["tokens"]) for e in again
    ]


def test_a_step_record_carries_what_it_promises_on_every_rank(tmp_path, small):
    run(tmp_path / "r", small("--eval.every=3"))
    for rank in (0, 1):
        events = list(read_events(tmp_path / "r" / "events" / f"rank-0000{rank}.jsonl"))
        assert [e["kind"] for e in events] == [
            "start",
            "step",
            "step",
            "counters",
            "step",
            "eval",
            "step",
            "step",
            "step",
            "eval",
            "checkpoint",
            "end",
        ]
        step = events[2]
        assert step.keys() >= {
            "kind",
            "attempt",
            "rank",
            "step",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "samples",
            "phases",
        }
        assert (step["rank"], step["attempt"], step["step"], step["samples"], step["tokens"]) == (
            rank,
            1,
            1,
            16,
            16 * 16,
        )
        assert step["phases"].keys() == {"fetch", "copy", "forward", "backward", "sync", "update"}
        assert step["communication"]["exposed_seconds"] == step["phases"]["sync"]
        assert step["communication"]["message_bytes"] > 0
        assert step["noise_scale"] is None or step["noise_scale"] > 0
        assert sum(step["phases"].values()) <= step["seconds"] * 1.5


def test_the_held_out_loss_is_weighed_by_tokens_and_the_same_on_any_ranks(tmp_path, small):
    held = {}
    for ranks in (1, 2, 4):
        config = small(
            "--precision.compute=fp64", "--eval.every=2", "--eval.samples=7", "--eval.holdout=0.1", ranks=ranks
        )
        result, _ = run(tmp_path / str(ranks), config)
        held[ranks] = [loss for _, loss in result.evaluations]
        assert [step for step, _ in result.evaluations] == [1, 3, 5]
    assert np.allclose(held[2], held[1], rtol=1e-10)
    assert np.allclose(held[4], held[1], rtol=1e-10)


class Points:
    """A sample is its own index; some samples poison the loss, some cannot be decoded."""

    def __init__(self, nan=(), broken=()):
        self.nan, self.broken = nan, broken

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index in self.broken:
            raise RuntimeError(f"cannot read {index}")
        return np.full(4, math.nan if index in self.nan else index / 32, np.float32), index % 3


def summed(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def own_config(steps=4, **parts) -> RunConfig:
    return RunConfig(
        steps=steps,
        batch=BatchConfig(global_=8, micro=2),
        eval=EvalConfig(holdout=0.0),
        layout=LayoutConfig(replicate=2),
        launch=LaunchConfig(device="cpu", collective_timeout=60.0),
        **parts,
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def samples_of(step: int) -> list[int]:
    from meshwright.data.stream import Stream

    return Stream.from_lengths(0, 8, [32], [1.0], 0.0).step(step).tolist()


def test_a_users_own_model_is_trained_in_place_whatever_the_ranks(tmp_path):
    trained = {}
    for ranks in (1, 2, 4):
        mine = model().double()
        before = mine[0].weight.clone()
        config = own_config(precision=RunConfig().precision.__class__(compute="fp64"))
        config = RunConfig(**{**config.__dict__, "layout": LayoutConfig(replicate=ranks)})
        result, _ = run(tmp_path / str(ranks), config, model=mine, loss=summed, source=Points())
        assert result.steps == 4
        assert not torch.equal(before, mine[0].weight)
        trained[ranks] = mine[0].weight.detach().clone()
    assert torch.allclose(trained[1], trained[2], rtol=1e-10)
    assert torch.allclose(trained[1], trained[4], rtol=1e-10)


def test_nan_stops_every_rank_in_the_same_step_and_names_the_first_module(tmp_path):
    poison = samples_of(2)[6]  # in the third step, on rank 1
    mine = model()
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "r", own_config(), model=mine, loss=summed, source=Points(nan={poison}))
    first = failed.value.first
    assert (failed.value.exit_code, first.rank, first.error_type) == (7, 1, "NumericsError")
    assert "rank 1 step 2: loss nan or its gradient is not finite, first in model.0" in first.message
    for rank in (0, 1):
        steps = [e for e in read_events(tmp_path / "r" / "events" / f"rank-0000{rank}.jsonl") if e["kind"] == "step"]
        assert [e["step"] for e in steps] == [0, 1, 2]
        assert steps[2]["loss"] is None
        assert steps[2]["skipped"]


def test_nan_is_skipped_on_every_rank_and_counted_when_the_policy_says_so(tmp_path):
    poison = samples_of(2)[6]
    config = own_config(numerics=NumericsConfig(on_nonfinite="skip"))
    result, steps = run(tmp_path / "r", config, model=model(), loss=summed, source=Points(nan={poison}))
    assert (result.steps, result.skipped) == (4, 1)
    assert [e.get("skipped", False) for e in steps] == [False, False, True, False]
    [named] = [e for e in read_events(tmp_path / "r" / "events" / "rank-00001.jsonl") if e["kind"] == "nonfinite"]
    assert named["module"] == "model.0"


def test_skipping_has_a_budget(tmp_path):
    config = own_config(numerics=NumericsConfig(on_nonfinite="skip", skip_budget=1))
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "r", config, model=model(), loss=summed, source=Points(nan=set(range(32))))
    assert failed.value.exit_code == 7
    assert "step 1" in failed.value.first.message


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_decoded_stops_every_rank_before_the_update(tmp_path, workers):
    broken = samples_of(1)[5]  # in the second step, on rank 1
    config = own_config(data=DataConfig(workers=workers))
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "r", config, model=model(), loss=summed, source=Points(broken={broken}))
    assert failed.value.exit_code == 6
    assert f"rank 1 step 1: sample {broken} (source Points, index {broken}) cannot be decoded" in str(failed.value)
    for rank in (0, 1):
        steps = [e for e in read_events(tmp_path / "r" / "events" / f"rank-0000{rank}.jsonl") if e["kind"] == "step"]
        assert [e["step"] for e in steps] == [0]


def test_quarantine_is_the_same_on_any_ranks_and_within_its_budget(tmp_path):
    broken = {samples_of(1)[5], samples_of(2)[0], samples_of(2)[1]}
    curves = []
    for ranks in (1, 2, 4):
        config = own_config(data=DataConfig(on_bad_sample="quarantine", bad_sample_budget=3))
        config = RunConfig(**{**config.__dict__, "layout": LayoutConfig(replicate=ranks)})
        result, steps = run(tmp_path / str(ranks), config, model=model(), loss=summed, source=Points(broken=broken))
        assert [e["tokens"] for e in steps] == [8, 7, 6, 8]
        curves.append([e["loss"] for e in steps])
        seen = {
            e["sample"]
            for r in range(ranks)
            for e in read_events(tmp_path / str(ranks) / "events" / f"rank-0000{r}.jsonl")
            if e["kind"] == "bad_sample"
        }
        assert seen == broken
    assert np.allclose(curves[0], curves[1], rtol=1e-5)
    assert np.allclose(curves[0], curves[2], rtol=1e-5)
    config = own_config(data=DataConfig(on_bad_sample="quarantine", bad_sample_budget=2))
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "over", config, model=model(), loss=summed, source=Points(broken=broken))
    assert failed.value.exit_code == 6
    assert "data.bad_sample_budget = 2" in str(failed.value)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precisions_train(tmp_path, small, compute):
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


def test_fp16_finds_its_scale_by_skipping_and_that_is_no_fault(tmp_path, small):
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


def test_another_run_is_refused_entry_with_both_values_and_fresh_sets_it_aside(tmp_path, small):
    run(tmp_path / "r", small(steps=1))
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "r", small("--seed=5", steps=1))
    assert failed.value.exit_code == IdentityError.exit_code
    assert "seed was 0 and is 5" in str(failed.value)
    train(small("--seed=5", steps=1), run=tmp_path / "r", fresh=True, quiet=True)
    assert (tmp_path / "r.old-1" / "run.toml").exists()


def test_another_layout_may_enter(tmp_path, small):
    run(tmp_path / "r", small(steps=1))
    run(tmp_path / "r", small(steps=1, ranks=1))
    starts = [e for e in read_events(tmp_path / "r" / "events" / "rank-00000.jsonl") if e["kind"] == "start"]
    assert [(e["attempt"], e["ranks"]) for e in starts] == [(1, 2), (2, 1)]


def test_no_steps_is_a_run_too(tmp_path, small):
    result, steps = run(tmp_path / "r", small(steps=0))
    assert (result.steps, result.loss, steps) == (0, None, [])


def test_noise_scale_is_recovered_from_gradients_whose_noise_is_known():
    """Local gradients g_r = G + noise of variance S / b: the estimate tends to S / |G|^2."""
    generator = np.random.default_rng(0)
    size, replicas, batch = 1000, 4, 32
    true = generator.normal(size=size)
    true *= 2.0 / np.linalg.norm(true)
    noise = 6.0 / np.sqrt(size)  # per sample: S = 36
    scale = NoiseScale(batch, replicas, smoothing=0.99)
    for _ in range(600):
        local = true + generator.normal(size=(replicas, size)) * noise / np.sqrt(batch / replicas)
        estimate = scale.update(float(np.linalg.norm(local.mean(0))), float((local**2).sum(1).mean()))
    assert estimate == pytest.approx(36 / 4, rel=0.1)
    assert NoiseScale(32, 1).update(1.0, 1.0) is None


def test_a_source_that_is_empty_is_named(tmp_path):
    with pytest.raises((DataError, RanksFailed), match="source 0 is empty"):
        train(own_config(), model=model(), loss=summed, source=[], run=tmp_path / "r", quiet=True)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss(), "reduction = 'mean'"),
        (lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), "shape"),
        (lambda out, y: (summed(out, y), 1), "loss counted 1 where the batch has 2"),
    ],
)
def test_a_loss_that_is_not_a_sum_is_refused(tmp_path, loss, said):
    with pytest.raises(RanksFailed) as failed:
        train(own_config(), model=model(), loss=loss, source=Points(), run=tmp_path / "r", quiet=True)
    assert failed.value.exit_code == 2
    assert said in str(failed.value)


class Moody(nn.Module):
    """Counts its passes in training mode; half of it is frozen by its owner."""

    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.line(self.norm(x))


def test_evaluation_leaves_each_modules_mode_as_its_owner_set_it(tmp_path):
    mine = Moody()
    mine.norm.eval()
    config = own_config(steps=6)
    config = RunConfig(**{**config.__dict__, "eval": EvalConfig(holdout=0.2, every=2, samples=4)})
    run(tmp_path / "r", config, model=mine, loss=summed, source=Points())
    assert int(mine.norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda o, y: 1.0, "loss gave a float"),
        (lambda o, y: None, "loss gave a NoneType"),
        (lambda o, y: summed(o, y).detach(), "cut from its graph"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(tmp_path, loss, said):
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "r", own_config(), model=model(), loss=loss, source=Points())
    assert failed.value.exit_code == 2
    assert said in str(failed.value)


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(RanksFailed, match="no parameter to train"):
        run(tmp_path / "r", own_config(), model=nn.Flatten(), loss=summed, source=Points())


def test_unused_parameters_are_allowed_when_the_config_says_so(tmp_path):
    mine = model()
    mine.register_parameter("idle", nn.Parameter(torch.zeros(3)))
    config = own_config(ddp=DDPConfig(find_unused_parameters=True))
    result, _ = run(tmp_path / "r", config, model=mine, loss=summed, source=Points())
    assert result.steps == 4


@pytest.mark.parametrize("item", [(None, 1), ("text", 1)])
def test_an_item_that_is_no_numbers_is_named_by_its_sample(tmp_path, item):
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path / "r", own_config(), model=model(), loss=summed, source=[item] * 32)
    assert failed.value.exit_code == 6
    assert "cannot be decoded: ValueError" in str(failed.value)


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
def test_a_config_made_in_python_is_checked_like_a_file(tmp_path, wrong):
    with pytest.raises(ConfigError):
        train(RunConfig(**wrong), run=tmp_path / "r", quiet=True)
