"""Tests of the headline signals: each state is told from the others, and the sentence names rank, step and phase."""

from __future__ import annotations

import os
import time

import pytest

from meshwright.base.history.signals import STATES, read_signals
from meshwright.base.records.heartbeat import AT_NOW, HEAD, NOW
from tests.kit.recorded_history import RecordedRun


@pytest.fixture
def run(tmp_path):
    return RecordedRun(tmp_path / "run")


def signals(run, after=0.05):
    found = read_signals(run.history(), run.now + after)
    assert found.state in STATES
    return found


def train(run, steps, **fields):
    for step in steps:
        run.step(step, **fields)


def test_starting_before_the_first_step(run):
    assert signals(run).state == "starting"
    run.start()
    run.hold()
    run.beat(0, "warmup", -1)
    found = signals(run)
    assert found.state == "starting"
    assert "warmup" in found.sentence


def test_stalled_if_the_start_takes_too_long(run):
    run.start()
    run.hold()
    assert signals(run, after=500.0).state == "starting"
    assert signals(run, after=700.0).state == "stalled"


def test_progressing_with_rates_and_eta(run):
    run.start()
    run.hold()
    train(run, range(20))
    found = signals(run)
    assert found.state == "progressing"
    progress = found.progress
    assert (progress.done, progress.steps) == (20, 100)
    assert progress.steps_per_second == pytest.approx(10.0)
    assert progress.samples_per_second == pytest.approx(160.0)
    assert progress.tokens_per_second == pytest.approx(1600.0)
    assert progress.eta_seconds == pytest.approx(8.0)
    assert progress.goodput == pytest.approx(320 / 4.05)
    assert found.communication.exposed_seconds == pytest.approx(0.015)
    assert found.communication.share == pytest.approx(0.15)
    assert found.communication.source == "host waits"


def test_a_command_that_finds_the_run_complete_keeps_its_signals(run):
    run.start()
    train(run, range(10))
    run.end("complete")
    before = signals(run)
    run.start()
    run.end("complete")
    after = signals(run)
    assert after.progress.steps_per_second == before.progress.steps_per_second
    assert after.communication == before.communication
    assert after.communication.exposed_seconds is not None


def test_recovery_posture_has_the_age_of_the_checkpoint_and_the_work_at_risk(run):
    run.start()
    run.hold()
    train(run, range(4))
    assert signals(run).recovery.checkpoint_step is None
    assert signals(run).recovery.steps_at_risk == 4
    run.save(4)
    train(run, range(4, 10))
    recovery = signals(run).recovery
    assert (recovery.checkpoint_step, recovery.steps_at_risk, recovery.restarts) == (4, 6, 0)
    assert recovery.checkpoint_age_seconds == pytest.approx(0.65)
    assert recovery.seconds_at_risk == pytest.approx(0.6)


def test_a_damaged_checkpoint_does_not_count(run):
    run.start()
    run.hold()
    train(run, range(4))
    run.save(2)
    run.save(4)
    run.write("damaged", checkpoint="step-00000004.a0001", damage=[])
    assert signals(run).recovery.checkpoint_step == 2


def test_stalled_if_no_rank_advances(run, monkeypatch):
    run.start()
    run.hold()
    train(run, range(5))
    beats = [run.beat(rank, "forward", 5) for rank in (0, 1)]
    monkeypatch.setattr(time, "monotonic", lambda: time.monotonic_ns() / 1e9 + 30.0)
    found = signals(run, after=30.0)
    assert found.state == "stalled"
    assert "30 s" in found.sentence
    assert "step 5, forward" in found.sentence
    assert len(beats) == 2


def test_stalled_also_if_nobody_has_looked_since_the_ranks_advanced(run, monkeypatch):
    run.start()
    run.hold()
    train(run, range(5))
    history = run.history()
    beat = run.beat(0, "forward", 3)
    history.update()
    beat.enter("forward", 5)
    monkeypatch.setattr(time, "monotonic", lambda: time.monotonic_ns() / 1e9 + 30.0)
    history.update()
    assert read_signals(history, run.now + 30.0).state == "stalled"


def test_a_rank_that_entered_a_phase_just_now_is_progress(run):
    run.start()
    run.hold()
    train(run, range(5))
    run.beat(0, "evaluate", 5)
    assert signals(run, after=30.0).state == "progressing"


def test_the_clock_of_a_rank_on_another_host_is_not_progress(run, monkeypatch):
    run.start()
    run.hold()
    train(run, range(5))
    heartbeat = run.beat(0, "forward", 5)
    HEAD.pack_into(heartbeat.memory, 0, b"MESHBEAT", 1, os.getpid(), 1)  # a process of another host
    NOW.pack_into(heartbeat.memory, AT_NOW, 5, 1, 1 << 62, b"forward")  # whose clock is far ahead
    assert signals(run, after=30.0).state == "stalled"


def test_waiting_names_the_rank_that_does_not_wait(run, monkeypatch):
    run.start()
    run.hold()
    train(run, range(5))
    run.beat(0, "sync", 5, waiting=True)
    run.beat(1, "backward", 5)
    monkeypatch.setattr(time, "monotonic", lambda: time.monotonic_ns() / 1e9 + 30.0)
    found = signals(run, after=30.0)
    assert (found.state, found.rank) == ("waiting", 1)
    assert found.sentence == "Rank 0 has waited for rank 1 for 30 s: it is at step 5, backward."


def test_a_straggler_is_named_while_the_run_progresses(run):
    run.start()
    run.hold()
    train(run, range(30))
    message = "rank 1 is slow"
    run.write("straggler", -1, rank=1, step=28, phase="forward", factor=2.5, seconds=0.1, message=message)
    found = signals(run)
    assert (found.state, found.rank) == ("progressing", 1)
    assert "Rank 1 is slow: 2.5 times the others, most of it in forward" in found.sentence


def test_an_attempt_that_continues_a_finished_one_is_no_restart(run):
    run.start()
    train(run, range(4))
    run.save(4)
    run.end("complete")
    run.start(first_step=4)
    train(run, range(4, 6))
    assert signals(run).recovery.restarts == 0


def test_replaying_until_the_attempt_has_passed_the_earlier_one(run):
    run.start()
    train(run, range(10))
    run.save(4)
    run.end("failed", rank=1, step=10, phase="forward", message="killed")
    run.start(restart=1, first_step=4)
    run.hold()
    assert signals(run).state == "restarting"
    train(run, range(4, 7))
    found = signals(run)
    assert found.state == "replaying"
    assert "4 to 9" in found.sentence
    assert found.recovery.restarts == 1
    train(run, range(7, 10))
    assert signals(run).state == "progressing"


def test_skipping_if_recent_updates_were_skipped(run):
    run.start()
    run.hold()
    train(run, range(10))
    train(run, range(10, 12), skipped=True)
    found = signals(run)
    assert found.state == "skipping"
    assert "step 11" in found.sentence


def test_restarting_between_two_attempts_and_failed_if_none_follows(run):
    run.start()
    run.hold()
    train(run, range(5))
    run.end("failed", rank=1, step=5, phase="forward", message="killed by signal 9 (SIGKILL)")
    found = signals(run)
    assert (found.state, found.rank) == ("restarting", 1)
    assert "rank 1 at step 5, forward: killed by signal 9" in found.sentence
    assert signals(run, after=100.0).state == "failed"  # a notebook's process lives on


def test_complete_stopped_and_failed_runs(tmp_path):
    for outcome in ("complete", "stopped", "failed"):
        run = RecordedRun(tmp_path / outcome)
        run.start()
        train(run, range(5))
        run.end(outcome, message="no more")
        assert signals(run, after=90.0).state == outcome
        assert "01:30 ago" in signals(run, after=90.0).sentence


def test_a_job_whose_processes_are_gone_has_failed(run):
    run.start()
    train(run, range(5))
    run.hold(pid=os.getpid(), started=1)  # another process has the pid now
    found = signals(run, after=5.0)
    assert found.state == "failed"
    assert "00:05 ago" in found.sentence


def test_a_folder_from_another_host_is_judged_by_its_newest_record(run):
    run.start()
    train(run, range(5))
    run.hold(boot="another boot")
    run.beat(0, "forward", 5)
    history = run.history()
    history.update(run.now + 5.0)
    assert read_signals(history, run.now + 5.0).state == "progressing"
    history.update(run.now + 3600.0)
    found = read_signals(history, run.now + 3600.0)
    assert found.state == "failed"
    assert "01:00:00 ago" in found.sentence


def test_a_job_on_another_host_lives_while_its_counters_advance(run):
    run.start()
    train(run, range(5))
    run.hold(boot="another boot")
    beat = run.beat(0, "forward", 5)
    history = run.history()
    beat.beat()
    history.update(run.now + 3600.0)
    assert history.is_alive
