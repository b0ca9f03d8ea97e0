"""Callbacks get the records of the run, and can neither change nor end it."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import torch

from meshwright import Callback, train
from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.callbacks import EarlyStopping, KeepBestCheckpoint
from meshwright.errors import ConfigError, RankError
from tests.kit.small_run import small_config

SETTINGS = ("--eval.every=2", "--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync")


class Recorder(Callback):
    """Writes what each hook gets to a file, because it runs in the process of a rank."""

    def __init__(self, file, every_rank=False):
        self.file = file
        self.every_rank = every_rank

    def write(self, hook, record, run):
        with open(f"{self.file}.{run.rank}", "a") as out:
            out.write(
                json.dumps({"hook": hook, "attempt_of_run": run.attempt, "first": run.first_step, **record}) + "\n"
            )

    def on_start(self, record, run):
        self.write("on_start", record, run)

    def on_step(self, record, run):
        self.write("on_step", record, run)

    def on_evaluate(self, record, run):
        self.write("on_evaluate", record, run)

    def on_checkpoint(self, record, run):
        self.write("on_checkpoint", record, run)

    def on_incident(self, record, run):
        self.write("on_incident", record, run)

    def on_end(self, record, run):
        self.write("on_end", record, run)


class Hostile(Callback):
    """Changes everything that it can reach, then fails."""

    every_rank = True

    def on_step(self, record, run):
        record["loss"] = None
        record["phases"].clear()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("medium")
        os.fork()
        raise SystemExit(3)

    @property
    def name(self):
        raise ValueError("no name")


def received(file, rank=0):
    path = f"{file}.{rank}"
    return [json.loads(line) for line in open(path)]


def events(folder, *kinds):
    return [event for event in read_events(RunFolder(folder).events(0)) if event["kind"] in kinds]


def test_callbacks_get_the_records_of_the_event_file_and_cannot_change_the_numbers(tmp_path):
    plain = train(small_config(*SETTINGS), run=tmp_path / "plain", quiet=True)
    hostile = [Hostile(), Recorder(tmp_path / "seen"), Recorder(tmp_path / "all", every_rank=True)]
    result = train(small_config(*SETTINGS), run=tmp_path / "run", callbacks=hostile, quiet=True)

    assert result.digest == plain.digest
    seen = received(tmp_path / "seen")
    kinds = ("start", "step", "eval", "checkpoint", "end")
    recorded = events(tmp_path / "run", *kinds)
    assert [{k: v for k, v in r.items() if k not in ("hook", "attempt_of_run", "first")} for r in seen] == recorded
    assert seen[0]["hook"] == "on_start"
    assert [r["step"] for r in received(tmp_path / "all", rank=1) if r["hook"] == "on_step"] == list(range(6))
    assert {r["rank"] for r in received(tmp_path / "all", rank=1)} == {1}
    (failure,) = events(tmp_path / "run", "callback_failed")  # once, although every step fails
    assert (failure["callback"], failure["hook"], failure["step"]) == ("Hostile", "on_step", 0)
    assert "SystemExit" in failure["message"]


def test_an_incident_reaches_the_next_attempt_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.backward:rank1:kill@step3")
    train(small_config(*SETTINGS), run=tmp_path / "run", callbacks=Recorder(tmp_path / "seen"), quiet=True)
    monkeypatch.delenv("MESHWRIGHT_FAULT")

    seen = received(tmp_path / "seen")
    (incident,) = [record for record in seen if record["hook"] == "on_incident"]
    assert (incident["outcome"], incident["rank"], incident["step"], incident["attempt_of_run"]) == ("failed", 1, 3, 2)
    hooks = [record["hook"] for record in seen]
    assert hooks.index("on_incident") < [i for i, hook in enumerate(hooks) if hook == "on_start"][1]
    assert [r["first"] for r in seen if r["hook"] == "on_start"] == [0, 2]

    train(small_config(*SETTINGS, steps=8), run=tmp_path / "run", callbacks=Recorder(tmp_path / "more"), quiet=True)
    assert "on_incident" not in [record["hook"] for record in received(tmp_path / "more")]


def test_an_incident_of_a_job_that_gives_up_reaches_the_supervisor(tmp_path, monkeypatch):
    class Listener(Callback):
        def on_incident(self, record, run):
            self.seen = record, run.attempt

    listener = Listener()
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.forward:rank0:raise@step1")
    config = small_config("--launch.restarts=0", *SETTINGS)
    with pytest.raises(RankError):
        train(config, run=tmp_path / "run", callbacks=[listener], quiet=True)
    record, attempt = listener.seen
    assert (record["kind"], record["outcome"], record["rank"], attempt) == ("incident", "failed", 0, 1)


def test_early_stopping_ends_all_ranks_with_a_checkpoint_and_a_repeated_command_does_nothing(tmp_path):
    config = small_config(*SETTINGS, "--early_stopping.patience=2", "--early_stopping.mode=max", steps=40)
    result = train(config, run=tmp_path / "run", quiet=True)
    assert "loss has not improved in 2 evaluations" in result.stopped
    assert result.steps < 40
    assert list_published(open_run_store(RunFolder(tmp_path / "run")))[0].step == result.steps
    evaluations = [record["loss"] for record in events(tmp_path / "run", "eval")]
    assert len(evaluations) == result.steps // 2
    assert max(evaluations) == max(evaluations[:-2])

    again = train(config, run=tmp_path / "run", quiet=True)
    assert (again.steps, again.digest, again.stopped) == (result.steps, result.digest, result.stopped)


def test_the_best_checkpoint_is_kept_through_retention_and_restarts(tmp_path, monkeypatch):
    keep = ("--checkpoint.keep_best=loss", "--checkpoint.best=max", "--checkpoint.keep=1", "--checkpoint.every=0")
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.backward:rank1:kill@step9")
    train(small_config(*SETTINGS, *keep, steps=12), run=tmp_path / "run", quiet=True)
    recorded = {record["step"] + 1: record["loss"] for record in events(tmp_path / "run", "eval")}
    best = max(recorded, key=lambda step: recorded[step])
    steps = {entry.step for entry in list_published(open_run_store(RunFolder(tmp_path / "run")))}
    assert steps == {best, 12}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--early_stopping.patience=2", "--eval.every=0"], "early_stopping.patience = 2 needs evaluations"),
        (["--checkpoint.keep_best=loss", "--checkpoint.mode=off"], "checkpoint.mode = off"),
        (
            ["--checkpoint.keep_best=accuracy"],
            "checkpoint.keep_best = accuracy, and a built-in model has no such metric",
        ),
    ],
)
def test_callbacks_that_cannot_work_are_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train(small_config(*overrides), run=tmp_path / "run", quiet=True)


def test_what_is_not_a_callback_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="callbacks contains str"):
        train(small_config(), run=tmp_path / "run", callbacks=["print"], quiet=True)


def test_an_unknown_metric_is_reported_once_and_the_run_continues(tmp_path):
    callbacks = [EarlyStopping(1, "accuracy"), KeepBestCheckpoint("accuracy")]
    train(small_config(*SETTINGS), run=tmp_path / "run", callbacks=callbacks, quiet=True)
    failures = events(tmp_path / "run", "callback_failed")
    assert [failure["callback"] for failure in failures] == ["EarlyStopping", "KeepBestCheckpoint"]
    assert "no metric accuracy" in failures[0]["message"]
