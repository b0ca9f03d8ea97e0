"""`evaluate`: the loss of a checkpoint on held-out samples or other data, on any layout, without a write to the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import meshwright
from meshwright.base.cli import main
from meshwright.base.config import EvalConfig
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.api.evaluation import evaluate
from meshwright.errors import CheckpointError, ConfigError, IdentityError
from tests.kit.custom_model import Points, summed_cross_entropy
from tests.kit.small_run import small_config

FLOAT64 = "--precision.compute=fp64"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    config = small_config(FLOAT64, "--eval.samples=11", "--model.vocab=260", "--data.kind=stdlib", steps=3)
    result = meshwright.train(config, run=folder / "run", quiet=True)
    (folder / "other.txt").write_text("".join(f"{number} squared is {number**2}\n" for number in range(120)))
    return folder, result


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_held_out_loss_is_that_of_the_run_on_any_layout(trained):
    folder, result = trained
    before = files(folder / "run")
    [(_, expected)] = result.evaluations[-1:]
    for options in ({}, {"ranks": 3}, {"overrides": ["layout.tensor=2", "layout.replicate=1"]}):
        found = evaluate(folder / "run", **options)
        assert found.loss == pytest.approx(expected, rel=1e-12)
        assert (found.samples, found.held_out, found.step) == (11, True, 3)
    assert files(folder / "run") == before


def test_every_sample_of_other_data_counts_once(trained):
    folder, _ = trained
    other = ["data.kind=text", f"data.path={folder / 'other.txt'}"]
    one = evaluate(folder / "run", overrides=other, ranks=1)
    staged = evaluate(folder / "run", overrides=[*other, "layout.pipeline=2", "layout.replicate=1"])
    length = (folder / "other.txt").stat().st_size + 1
    assert not one.held_out
    assert one.samples == length // 16
    assert one.tokens == staged.tokens == one.samples * 16
    assert staged.loss == pytest.approx(one.loss, rel=1e-12)
    assert one.perplexity == pytest.approx(2.718281828459045**one.loss)
    assert evaluate(folder / "run", overrides=other, ranks=2, samples=5).samples == 5


def test_command_line_prints_text_and_json(trained, capsys):
    folder, _ = trained
    main(["evaluate", str(folder / "run"), "--ranks=1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {
        *("checkpoint", "step", "samples", "held_out", "tokens", "loss", "perplexity", "metrics"),
    }
    assert answer["checkpoint"].startswith("step-00000003")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 7}, CheckpointError, "has no checkpoint of step 7"),
        ({"samples": 0}, ConfigError, "samples 0 is out of range"),
        ({"overrides": ["model.ffn=56"], "ranks": 1}, IdentityError, "is of another model"),
        ({"overrides": ["data.kind=text", "data.path=absent.txt"]}, Exception, "absent.txt"),
        (
            {"overrides": ["data.path=other.txt"]},
            ConfigError,
            "data.path = other.txt has no effect: data.kind is stdlib",
        ),
        ({"overrides": ["optimizer.lr=1"]}, ConfigError, "optimizer.lr has no effect on an evaluation; try without"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(trained, options, error, message):
    with pytest.raises(error, match=message):
        evaluate(trained[0] / "run", **options)


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).float()


def test_custom_models_have_their_metrics_on_any_ranks(tmp_path):
    from tests.kit.custom_model import custom_config

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    user = UserCode(model, summed_cross_entropy, Points(), metrics={"accuracy": accuracy})
    config = custom_config(steps=3, ranks=1, eval=EvalConfig(holdout=0.25, samples=6, every=3))
    result = meshwright.train(
        config, model=model, loss=summed_cross_entropy, source=Points(), metrics={"accuracy": accuracy},
        run=tmp_path / "run", quiet=True,
    )  # fmt: skip
    found = [evaluate(tmp_path / "run", ranks=ranks, user=user) for ranks in (1, 2)]
    assert found[0].loss == pytest.approx(result.evaluations[-1][1], rel=1e-6)
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-6)
    assert found[0].metrics == pytest.approx(found[1].metrics)
    assert found[0].metrics.keys() == {"accuracy"}
