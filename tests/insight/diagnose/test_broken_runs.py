"""The classes numerics, replay, hang and crash: each names the cause, the step and the rank from a run's records."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshwright.base.history.signals import read_signals
from meshwright.base.records.incidents import Incident, assign_verdict
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.run import crashes, hangs, numerics, replayed_samples
from meshwright.insight.diagnose.run.diagnose import diagnose_run, order_findings
from meshwright.insight.diagnose.run.loss_trend import find_divergence, find_spikes
from tests.insight.diagnose.recorded_run import RecordedRun


@pytest.fixture
def run(tmp_path):
    return RecordedRun(tmp_path)


def noisy(steps: int, level: float = 5.0, noise: float = 0.02, seed: int = 0) -> list[float]:
    return (level + noise * np.random.default_rng(seed).standard_normal(steps)).tolist()


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


@pytest.mark.parametrize(
    ("rates", "times", "suggested"),
    [
        (
            [3e-4] * 19 + [9e-3] + [3e-4] * 30,
            ", 30 times optimizer.lr by the schedule,",
            3e-5,
        ),  # one step of a schedule
        ([3e-4] * 15 + [3e-5] * 35, "", 1.5e-5),  # it has decayed
    ],
)
def test_suggested_learning_rate_is_below_the_one_in_effect_and_the_setting(run, rates, times, suggested):
    """A schedule gives a multiple of optimizer.lr at every step."""
    run.folder.run_file.write_text("[optimizer]\nlr = 3e-4\n")
    run.begin()
    run.steps(0, [*noisy(20), *noisy(30, 60.0, 10.0)], lr=rates)
    run.end()
    (finding,) = numerics.find(run.history())
    assert (finding.variant, finding.step) == ("divergence", 20)
    assert f"the learning rate {max(rates[15:21]):.3g}{times} is too high" in finding.sentence
    assert finding.change.settings == (f"optimizer.lr = {suggested}",)


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


def rank_rows(*locations: tuple[str, int]) -> list[dict]:
    return [{"rank": rank, "location": text, "collectives": count} for rank, (text, count) in enumerate(locations)]


def test_hang_names_the_rank_and_those_that_wait_for_it(run):
    run.begin(ranks=3)
    run.steps(0, noisy(6))
    ranks = rank_rows(
        ("step 6, sync, waiting in step control vector", 24),
        ("step 6, sync, waiting in step control vector", 24),
        ("step 6, fetch", 23),
    )
    run.end("hang", rank=2, step=6, phase="fetch", message="rank 2 has made no progress for 5.1 s", ranks=ranks)
    (finding,) = hangs.find(run.history())
    assert (finding.variant, finding.rank, finding.step, finding.phase) == ("no progress", 2, 6, "fetch")
    assert finding.sentence.endswith("ranks 0, 1 wait in step control vector")
    assert list(crashes.find(run.history())) == []


def test_hang_that_the_run_has_survived_is_ordered_by_the_time_that_it_cost(run):
    run.begin()
    run.steps(0, noisy(10))
    run.time += 7.0
    run.end("hang", rank=1, step=10, phase="fetch", message="rank 1 has made no progress for 7.0 s")
    run.time += 1.0
    run.begin(step=8)
    run.steps(8, noisy(118))
    run.end()
    (finding,) = hangs.find(run.history())
    assert finding.survived
    assert finding.share == pytest.approx((7 + 1 + 0.2) / (1 + 7 + 1 + 11.8))
    slower = Finding("data", "loader", "", 0.5, "high")
    assert order_findings([finding, slower]) == [slower, finding]


FAULTHANDLER = """Thread 0x00007f10d61896c0 (most recent call first):
  File "/site/meshwright/core/trainer/signals.py", line 49 in _listen
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner

Current thread 0x00007f110849eb80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
%s  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1789 in _call_impl
  File "/site/meshwright/core/trainer/step.py", line 170 in run
  File "/site/meshwright/core/trainer/loop.py", line 60 in train_rank
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
  File "/home/me/train.py", line 10 in <module>
"""
PY_SPY = """Process 123: python train.py
Python v3.11.7

Thread 123 (idle): "MainThread"
    wait (threading.py:331)
%s    _call_impl (torch/nn/modules/module.py:1789)
    train_rank (meshwright/core/trainer/loop.py:60)
    <module> (train.py:10)
Thread 124 (idle): "Thread-1"
    other (mine.py:3)
"""


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (
            FAULTHANDLER
            % '  File "/home/me/model.py", line 22 in lookup\n  File "/home/me/model.py", line 18 in forward\n',
            "lookup (/home/me/model.py, line 22), blocked in wait (/usr/lib/python3.11/threading.py, line 331)",
        ),
        (FAULTHANDLER % "", "wait (/usr/lib/python3.11/threading.py, line 331)"),
        (PY_SPY % "    lookup (model.py:22)\n", "lookup (model.py, line 22), blocked in wait (threading.py, line 331)"),
        (PY_SPY % "", "wait (threading.py, line 331)"),
        ("", "attempts/0001/rank-00001.log"),
    ],
)
def test_stack_of_a_hang_ends_in_the_users_own_code(run, stack, place):
    """The script that has started the job is on the stack of a rank as well, and is not where it hangs."""
    run.begin()
    run.steps(0, noisy(6))
    run.end("hang", rank=1, step=6, phase="forward", message="rank 1 has made no progress for 5.1 s", stack=stack)
    (finding,) = hangs.find(run.history())
    assert finding.change.action.startswith("see where rank 1 is: ")
    assert finding.change.action.endswith(place)


def test_run_that_waits_for_a_rank_now_is_a_hang_in_progress(run, monkeypatch):
    run.begin()
    run.steps(0, noisy(6))
    history = run.history()
    monkeypatch.setattr(type(history), "is_alive", True)
    signals = read_signals(history, run.time + 100)
    waiting = replace(signals, state="waiting", sentence="the ranks wait for rank 1", rank=1)
    monkeypatch.setattr(hangs, "read_signals", lambda _history, _now: waiting)
    (finding,) = hangs.find(history)
    assert (finding.variant, finding.rank, finding.share) == ("in progress", 1, 1.0)
    monkeypatch.setattr(hangs, "read_signals", lambda _history, _now: replace(signals, state="progressing"))
    assert list(hangs.find(history)) == []


def test_ranks_in_different_collectives_are_a_hang_even_if_the_backend_fails(run):
    run.begin(ranks=3)
    run.steps(0, noisy(9))
    ranks = rank_rows(
        ("step 9, sync, waiting in step control vector", 36),
        ("step 9, fetch, waiting in my all-reduce", 36),
        ("step 9, sync, waiting in step control vector", 36),
    )
    run.end("failed", rank=1, step=9, error_type="Killed", message="rank 1 was killed by signal 6", ranks=ranks)
    (finding,) = hangs.find(run.history())
    assert (finding.variant, finding.rank, finding.step) == ("different collectives", 1, 9)
    assert "rank 1 is in my all-reduce and rank 0 in step control vector" in finding.sentence
    assert list(crashes.find(run.history())) == []


WATCHDOG = (
    "ranks entered different collectives: collective 24 is 'my all-reduce' on rank 1 and 'bucket 0' on rank(s) 0, 2"
)
GLOO = (
    "what(): [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 600 vs 4. Received data size doesn't match "
    "expected size. Is there a distributed collective mismatch in your code?"
)
TORCH = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: OpType=BROADCAST, but Rank 1 is "
    "running collective: OpType=ALLREDUCE"
)


@pytest.mark.parametrize(
    ("incident", "named", "rank"),
    [
        ({"message": f"{WATCHDOG}; then rank 0 was killed by signal 6 (SIGABRT)"}, WATCHDOG, 1),
        ({"message": f"{WATCHDOG}; then rank 0 was killed by signal 9 (SIGKILL)"}, WATCHDOG, 1),
        ({"message": "rank 0 was killed by signal 6 (SIGABRT)", "log_tail": ["terminate called", GLOO]}, GLOO, 1),
        ({"message": TORCH, "error_type": "RuntimeError"}, TORCH, 1),
    ],
)
def test_collectives_that_the_log_calls_different_are_the_cause_of_a_crash(run, incident, named, rank):
    """The ranks have left the collective when the incident is written, and earlier attempts failed at other steps."""
    run.begin()
    run.steps(0, noisy(4))
    run.end("failed", rank=1, step=4, error_type="OSError")
    run.begin(step=0, ranks=3)
    run.steps(0, noisy(9))
    ranks = rank_rows(("step 9, sync", 26), ("step 9, forward", 24), ("step 9, sync", 26))
    fields = {"rank": 0, "step": 9, "error_type": "Killed", "ranks": ranks} | incident
    verdict = assign_verdict(Incident(2, "failed", **fields), [Incident(1, "failed", rank=1, step=4)]).verdict
    assert verdict == "first failure"
    run.end("failed", verdict=verdict, **fields)
    finding = diagnose_run(run.history())[0]
    assert (finding.cause, finding.variant, finding.rank, finding.step) == ("hang", "different collectives", rank, 9)
    assert named in finding.sentence
    assert "rank 1 at step 9, forward" in finding.sentence
    assert "same collectives in the same order" in finding.change.action
    assert "infrastructure" not in [one.variant for one in diagnose_run(run.history())]


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
