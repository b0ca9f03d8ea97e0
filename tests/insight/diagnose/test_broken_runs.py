"""The classes numerics, replay and crash: each names the cause, the step and the rank from a run's records."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.insight.diagnose.run import crashes, numerics, replayed_samples
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.diagnose.run.loss_trend import find_divergence, find_spikes
from tests.insight.diagnose.recorded_run import RecordedRun, noisy


@pytest.fixture
def run(tmp_path):
    return RecordedRun(tmp_path)


def decay(steps: int) -> np.ndarray:
    """A loss that is learnt quickly, with a little noise."""
    return 5.5 * np.exp(-np.arange(steps) / 12) + 0.3 + 0.004 * np.random.default_rng(1).standard_normal(steps)


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_a_falling_loss_are_neither_spikes_nor_divergence(seed):
    norm = np.exp(0.3 * np.random.default_rng(seed).standard_normal(200))
    for loss in (np.array(noisy(200, seed=seed)), decay(200)):
        assert find_spikes(loss, norm) == []
        assert find_divergence(loss) is None


@pytest.mark.parametrize("step", [12, 25, 36])
def test_spike_on_a_falling_loss_is_found_at_its_step(step):
    loss, norm = decay(40), np.ones(40)
    loss[step] += 0.15 * loss[step]
    norm[step] = 3.0
    assert [spike.index for spike in find_spikes(loss, norm)] == [step]


def test_loss_spike_names_the_step_and_the_replay_that_shows_its_samples(run):
    losses = noisy(60)
    losses[33] = 7.5
    run.begin()
    run.steps(0, losses, grad_norm=[1.0 + 4 * (step == 33) for step in range(60)])
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step, finding.confidence) == ("loss spike", 33, "high")
    assert finding.check == "meshwright replay RUN --step 33"
    first = diagnose_run(run.history())[0]
    assert (first.cause, first.check) == ("numerics", f"meshwright replay {run.folder.root} --step 33")
    run.folder.run_file.write_text('[custom_model]\nclass = "Net"\nmodel = "my:net"\nloss = "my:loss"\n')
    assert diagnose_run(run.history())[0].check == f"{first.check} --model my:net --loss my:loss"


def test_diverging_learning_rate_is_named_with_a_lower_one(run):
    run.begin()
    run.steps(0, [5.5, 5.4, 5.3, 9.0, 40.0, *noisy(30, 60.0, 10.0)], lr=0.4, grad_norm=[1.0] * 3 + [50.0] * 32)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step, finding.confidence) == ("divergence", 3, "high")
    assert finding.change.settings == ("optimizer.lr = 0.04",)


def test_suggested_learning_rate_is_below_the_one_in_effect_and_the_setting(run):
    """A schedule gives a multiple of optimizer.lr at every step, here in one of them."""
    run.folder.run_file.write_text("[optimizer]\nlr = 3e-4\n")
    run.begin()
    run.steps(0, [*noisy(20), *noisy(30, 60.0, 10.0)], lr=[3e-4] * 19 + [9e-3] + [3e-4] * 30)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step, finding.confidence) == ("divergence", 20, "high")
    assert "the learning rate 0.009, 30 times optimizer.lr by the schedule, is too high" in finding.sentence
    assert finding.change.settings == ("optimizer.lr = 3e-05",)


@pytest.mark.parametrize(("healthy", "rate"), [(15, 3e-5), (150, 3e-6)])
def test_divergence_at_a_lower_learning_rate_than_before_is_not_blamed_on_the_rate(run, healthy, rate):
    run.folder.run_file.write_text("[optimizer]\nlr = 3e-4\n")
    run.begin()
    run.steps(0, [*noisy(healthy + 5), *noisy(30, 60.0, 10.0)], lr=[3e-4] * healthy + [rate] * 35)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step, finding.confidence) == ("divergence", healthy + 5, "medium")
    assert finding.sentence.endswith(f"the learning rate {rate:.3g} is below 0.0003, at which the loss did not diverge")
    assert finding.change.settings == ()
    assert finding.change.action.startswith(f"look at the samples of the steps before {healthy + 5}")


def test_loss_spike_names_the_schedule_that_raises_the_learning_rate(run):
    run.begin()
    run.steps(
        0, [7.5 if step == 33 else loss for step, loss in enumerate(noisy(60))], lr=[3e-4] * 32 + [9e-3] + [3e-4] * 27
    )
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step) == ("loss spike", 33)
    assert finding.change.action.startswith(
        "the schedule raises the learning rate from 0.0003 to 0.009 there; replay of"
    )


def test_loss_that_grows_until_it_is_not_finite_has_diverged_and_is_no_crash(run):
    run.begin()
    run.steps(0, [5.5, 60.0, 4000.0, None])
    run.write("nonfinite", step=3, loss=None, module="head")
    run.end("failed", error_type="NumericsError", step=3, rank=0, exit_code=7, message="not finite")
    assert [finding.variant for finding in numerics.find(run.history())] == ["divergence"]
    assert list(crashes.find(run.history())) == []


def test_findings_on_values_that_are_not_finite_are_valid_json(run):
    run.begin()
    run.steps(0, [5.5, *[None] * 12], grad_norm=None, lr=None)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.change.settings) == ("divergence", ())
    json.dumps(finding.to_json(), allow_nan=False)


def test_first_module_that_is_not_finite_is_named(run):
    run.begin()
    run.steps(0, [*noisy(20), None])
    run.write("nonfinite", step=20, loss=None, module="decoder.blocks.1.ffn")
    run.write("nonfinite", 1, step=20, loss=None, module="")
    run.end("failed", error_type="NumericsError", step=20, rank=0, exit_code=7)
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step, finding.rank) == ("non-finite", 20, 0)
    assert "decoder.blocks.1.ffn" in finding.sentence


def test_falling_loss_scale_is_an_overflow_with_the_scale_that_worked(run):
    scale = [2.0 ** (30 - min(step, 9)) for step in range(30)]
    run.begin()
    run.steps(0, noisy(30), loss_scale=scale, skipped=[s < 9 for s in range(30)], grad_norm=[None] * 9 + [1.0] * 21)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step, finding.share) == ("overflow", 0, 0.3)
    assert finding.change.settings == ("precision.loss_scale = 2097152.0",)


def test_overflow_at_the_usual_growth_of_the_loss_scale_is_healthy(run):
    run.begin()
    run.steps(0, noisy(100), loss_scale=65536.0, skipped=[step == 50 for step in range(100)])
    run.end()
    assert list(numerics.find(run.history())) == []


def test_zero_gradients_under_a_loss_scale_are_an_underflow(run):
    run.begin()
    run.steps(0, noisy(20), loss_scale=0.5, grad_norm=0.0)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.share) == ("underflow", 1.0)


def test_restart_from_an_old_checkpoint_is_replay_with_the_steps_and_samples(run):
    run.begin()
    run.steps(0, noisy(30))
    run.end("failed", step=30, rank=1, error_type="Killed", message="rank 1 was killed by signal 9 (SIGKILL)")
    run.begin(step=10)
    run.steps(10, noisy(40))
    run.end()
    (finding,) = replayed_samples.find(run.history())
    assert (finding.variant, finding.step) == ("lost work", 10)
    assert "20 steps (160 samples)" in finding.sentence
    assert finding.share == pytest.approx(20 / 70)
    assert finding.change.settings == ("checkpoint.every = 10",)


def test_published_checkpoint_that_was_not_restored_is_named(run):
    run.begin()
    run.steps(0, noisy(30))
    run.write("checkpoint", step=30, bytes=1, stall_seconds=0.0, seconds=0.0, retention_error="")
    run.end()
    run.begin(step=10)
    run.steps(10, noisy(40))
    run.end()
    (finding,) = replayed_samples.find(run.history())
    assert finding.variant == "lost checkpoint"
    assert "the checkpoint of step 30 had been published" in finding.sentence


def test_restart_that_loses_little_is_not_reported(run):
    run.begin()
    run.steps(0, noisy(100))
    run.end("failed", step=99)
    run.begin(step=99)
    run.steps(99, noisy(50))
    run.end()
    assert list(replayed_samples.find(run.history())) == []


def test_fork_with_a_smaller_batch_reads_positions_twice(run):
    run.begin()
    run.steps(0, noisy(10), samples=16)
    run.end()
    run.begin(step=10)
    run.steps(10, noisy(20), samples=8)
    run.end()
    (finding,) = replayed_samples.find(run.history())
    assert (finding.variant, finding.step) == ("positions read twice", 10)
    assert "80 positions" in finding.sentence


@pytest.mark.parametrize(
    ("incident", "variant", "confidence", "action"),
    [
        ({"verdict": "data-dependent", "samples": [7, 9]}, "data-dependent", "high", "samples 7, 9"),
        ({"verdict": "deterministic", "recommendation": "see it"}, "deterministic", "high", "see it"),
        ({"verdict": "infrastructure", "message": "(SIGKILL)"}, "infrastructure", "high", "memory"),
        ({"verdict": "first failure", "error_type": "HostLost"}, "infrastructure", "medium", "check the hosts"),
        (
            {"verdict": "first failure", "error_type": "Killed", "message": "(SIGSEGV)"},
            "deterministic",
            "low",
            "run it again",
        ),
        ({"verdict": "first failure", "error_type": "DataError"}, "data-dependent", "high", "data show RUN --step 9"),
        ({"verdict": "first failure", "error_type": "ValueError"}, "deterministic", "low", "run it again"),
    ],
)
def test_crash_is_deterministic_data_dependent_or_infrastructure(run, incident, variant, confidence, action):
    run.begin()
    run.steps(0, noisy(9))
    run.end("failed", rank=1, step=9, phase="forward", **incident)
    (finding,) = crashes.find(run.history())
    assert (finding.variant, finding.confidence, finding.rank, finding.step) == (variant, confidence, 1, 9)
    assert action in finding.change.action
    assert finding.check == "meshwright replay RUN --step 9"


def test_crash_that_the_run_has_survived_at_little_cost_is_not_reported(run):
    run.begin()
    run.steps(0, noisy(50))
    run.end("failed", rank=1, step=50, message="(SIGKILL)", verdict="first failure")
    run.begin(step=49)
    run.steps(49, noisy(60))
    run.end()
    assert list(crashes.find(run.history())) == []


def test_supervisor_that_was_killed_is_infrastructure(run):
    run.begin()
    run.steps(0, noisy(9))
    (finding,) = crashes.find(run.history())
    assert (finding.variant, finding.step) == ("infrastructure", 9)
