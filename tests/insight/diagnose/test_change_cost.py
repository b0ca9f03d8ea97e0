"""The predicted step time of a change: by the planner where it knows the machine, else by the measured share."""

from __future__ import annotations

import pytest

from meshwright.base.config import MetricsConfig, ProfileConfig, load_config
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.api import trial_config, try_first_finding
from meshwright.insight.diagnose.finding import Change, Finding
from meshwright.insight.diagnose.run.timed_steps import timed_steps
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.run_prediction import predict_run
from meshwright.planner.report.change_cost import change_settings, changes_numbers, with_costs
from meshwright.planner.workload.planned_job import PlannedJob
from tests.insight.diagnose.synthetic_run import SyntheticRun
from tests.kit.fake_machine import write_machine

PIPELINE = ("--model.layers=4", "--layout.replicate=1", "--layout.pipeline=2", "--batch.micro=8")


def costed(job, *settings, cause="bubble", share=0.2):
    history = job.history()
    finding = Finding(cause, "", "", share, "high", change=Change(settings))
    return with_costs(finding, history, timed_steps(history)).change


def test_planner_costs_the_change_on_a_measured_machine(tmp_path, home):
    machine = write_machine(home)
    job = SyntheticRun(tmp_path, *PIPELINE)
    job.write_plan(**predict_run(job.config, 1, "cpu").record)
    change = costed(job, "batch.micro = 2")
    before, after = (
        estimate(PlannedJob.from_config(config, machine.with_devices(2))).seconds
        for config in (job.config, change_settings(job.config, ("batch.micro = 2",)))
    )
    assert change.predicted_by == "planner"
    assert change.predicted_seconds == pytest.approx(0.1 * after / before)


def test_measured_share_costs_what_the_planner_does_not_model(tmp_path, home):
    write_machine(home)
    job = SyntheticRun(tmp_path)
    job.write_plan(**predict_run(job.config, 1, "cpu").record)
    change = costed(job, "ddp.bucket_cap_mb = 4.0", cause="communication")
    assert (change.predicted_by, change.predicted_seconds) == ("measured share", pytest.approx(0.08))


def test_prediction_for_another_machine_is_not_used(tmp_path, home):
    write_machine(home)
    job = SyntheticRun(tmp_path, *PIPELINE)
    job.write_plan(**predict_run(job.config, 1, "cpu").record | {"cluster": "h100:8"})
    assert costed(job, "batch.micro = 2").predicted_by == "measured share"


def test_change_that_does_not_fit_the_other_settings_becomes_advice(tmp_path):
    change = costed(SyntheticRun(tmp_path, *PIPELINE), "batch.micro = 5")
    assert (change.settings, change.predicted_seconds) == ((), None)
    assert "batch.micro = 5" in change.action


def test_change_that_the_planner_predicts_to_be_slower_becomes_advice(tmp_path, home):
    write_machine(home)
    job = SyntheticRun(tmp_path, *PIPELINE, "--batch.micro=2")
    job.write_plan(**predict_run(job.config, 1, "cpu").record)
    change = costed(job, "batch.micro = 8")
    assert (change.settings, change.predicted_seconds) == ((), None)
    assert "the planner predicts that batch.micro = 8 takes" in change.action


@pytest.mark.parametrize("line", ["fsdp.prefetch = 2", "data.workers = 0", "optimizer.momentum = 0.5"])
def test_settings_that_the_run_has_or_does_not_use_are_not_proposed(tmp_path, line):
    change = costed(SyntheticRun(tmp_path), line, cause="communication")
    assert (change.settings, change.action) == ((), f"{line} has no effect on this run")


def test_change_of_a_broken_run_has_no_predicted_time(tmp_path):
    assert costed(SyntheticRun(tmp_path), "optimizer.lr = 0.001", cause="numerics").predicted_seconds is None


def test_identity_settings_change_the_numbers_and_placement_does_not():
    config = load_config()
    assert changes_numbers(config, change_settings(config, ("model.router_bias_rate = 0.1",)))
    assert not changes_numbers(config, change_settings(config, ("data.workers = 2", 'checkpoint.mode = "sync"')))
    with pytest.raises(ConfigError, match=r"batch\.micro = 5"):
        change_settings(config, ("batch.micro = 5",))


def test_trial_neither_serves_nor_pushes_metrics_nor_profiles():
    """The settings may come from somebody else, and the port may be that of a run."""
    config = load_config(overrides=["metrics.port=9400", "metrics.otlp=http://127.0.0.1:9", "profile.steps=1:3"])
    trial = trial_config(config, 20, saves=False)
    assert (trial.metrics, trial.profile) == (MetricsConfig(), ProfileConfig())
    assert trial.steps == 20


@pytest.mark.parametrize("steps", [-5, 0, 3])
def test_trial_of_too_few_steps_does_not_start(tmp_path, steps):
    with pytest.raises(ConfigError, match=f"--steps {steps} are too few to measure; expected at least"):
        try_first_finding(tmp_path, {}, steps=steps)
