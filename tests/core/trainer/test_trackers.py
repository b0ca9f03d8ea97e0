"""Experiment trackers log the scalars of a run, as one run through restarts."""

from __future__ import annotations

import pytest

from meshwright import train
from meshwright.base.io import read_json
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.trainer.callbacks import configured
from meshwright.errors import ConfigError
from tests.kit.small_run import small_config

SETTINGS = (
    "--eval.every=4",
    "--checkpoint.every=2",
    "--checkpoint.seconds=0",
    "--checkpoint.mode=sync",
    "--trackers.every=1",
)


def test_trackers_have_one_run_with_every_step_after_a_restart(tmp_path, monkeypatch):
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.backward:rank1:kill@step5")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlruns = (tmp_path / "mlruns").as_uri()
    trackers = ("--trackers.tensorboard=true", "--trackers.wandb=offline", f"--trackers.mlflow={mlruns}")
    folder = tmp_path / "run"
    train(small_config(*SETTINGS, *trackers, steps=8), run=folder, quiet=True)
    assert not [e for e in read_events(RunFolder(folder).events(0)) if e["kind"] == "callback_failed"]
    losses = {e["step"]: e["loss"] for e in read_events(RunFolder(folder).events(0)) if e["kind"] == "step"}

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(8))
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx([losses[s] for s in range(8)])
    assert [event.step for event in board.Scalars("eval/loss")] == [3, 7]

    client = MlflowClient(tracking_uri=mlruns)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert [run.info.run_id for run in runs] == [read_json(folder / "mlflow.json")["run_id"]]
    assert runs[0].info.status == "FINISHED"
    history = {m.step: m.value for m in client.get_metric_history(runs[0].info.run_id, "train/loss")}
    assert history == pytest.approx(losses)
    assert runs[0].data.params["optimizer.lr"] == "0.003"

    attempts = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(attempts) == 2
    assert len({path.name.rpartition("-")[2] for path in attempts}) == 1  # one id: `wandb sync` makes one run of them


def test_a_missing_package_is_refused_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setattr(configured, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"trackers.wandb needs the package wandb; try pip install"):
        train(small_config("--trackers.wandb=offline"), run=tmp_path / "run", quiet=True)
