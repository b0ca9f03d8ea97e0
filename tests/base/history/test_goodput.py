"""Tests of the goodput account: the parts add up to the wall time exactly, and each second has its cause."""

from __future__ import annotations

import json

import pytest

from meshwright.base.history.goodput import PARTS, goodput
from tests.kit.recorded_history import BEGIN, PHASES, RecordedRun


def account(run, now=None):
    result = goodput(run.history(), run.now if now is None else now)
    assert list(result.parts) == list(PARTS)
    assert sum(result.nanoseconds.values()) == result.wall_nanoseconds
    assert sum(sum(one.nanoseconds.values()) for one in result.attempts) == result.wall_nanoseconds
    assert min(result.nanoseconds.values()) >= 0
    return result


def known(result):
    """The parts that are not empty, in seconds."""
    return {part: seconds for part, seconds in result.parts.items() if seconds}


@pytest.fixture
def run(tmp_path):
    return RecordedRun(tmp_path / "run")


def test_account_of_an_undisturbed_run(run):
    run.start(seconds=3.0)
    for step in range(10):
        run.step(step)
    run.end(seconds=2.0)
    result = account(run)
    assert result.wall_seconds == pytest.approx(run.now - BEGIN, abs=1e-6)
    expected = {"productive": 0.75, "data": 0.1, "exposed communication": 0.15, "start": 3.0, "end": 2.0}
    assert known(result) == pytest.approx(expected, abs=1e-5)
    assert result.unique_samples == 160
    assert result.samples_per_second == pytest.approx(160 / 6)


def test_outside_phases_of_the_next_step_divide_the_time_between_steps(run):
    run.start()
    run.step(0)
    run.now += 1.0
    run.step(1, outside={"evaluate": 0.4, "save": 0.3, "callback": 0.2})
    run.now += 0.5
    run.write("end", steps=2, loss=1.0, stopped="", parameters_digest="", outside={"save": 0.3})
    run.end("stopped")
    parts = account(run).parts
    assert parts["evaluation"] == pytest.approx(0.4, abs=1e-6)
    assert parts["checkpoint"] == pytest.approx(0.6, abs=1e-6)
    assert parts["callback"] == pytest.approx(0.2, abs=1e-6)
    assert parts["bookkeeping"] == pytest.approx(0.1, abs=1e-5)
    assert parts["end"] == pytest.approx(1.2, abs=1e-5)


def test_steps_that_a_later_attempt_repeats_are_lost_work_and_the_time_to_its_first_step_is_the_restart(run):
    run.start()
    for step in range(6):
        run.step(step)
        if step == 3:
            run.save(4)
    run.end("failed", seconds=1.5, rank=1, step=6, phase="forward", message="killed")
    run.now += 0.5
    run.start(restart=1, first_step=4, seconds=2.5)
    for step in range(4, 8):
        run.step(step)
    run.end()
    result = account(run)
    assert result.parts["lost work"] == pytest.approx(0.2, abs=1e-5)
    assert result.parts["restart"] == pytest.approx(4.5, abs=1e-5)
    assert result.parts["start"] == pytest.approx(2.0, abs=1e-5)
    assert result.parts["idle"] == 0
    assert result.unique_samples == 8 * 16


def test_the_account_of_a_run_under_torchrun_needs_no_supervisor(run):
    run.attempt = 1
    run.write("start", steps=10, ranks=2, restart=0, process_started=run.now - 3.0)
    for step in range(4):
        run.step(step)
    run.now += 4.0
    run.attempt = 2
    run.write("start", steps=10, ranks=2, restart=1, process_started=run.now - 3.0)
    for step in range(10):
        run.step(step)
    parts = account(run).parts
    assert parts["start"] == pytest.approx(3.0, abs=1e-4)
    assert parts["restart"] == pytest.approx(4.0, abs=1e-4)
    assert parts["lost work"] == pytest.approx(1.4, abs=1e-4)  # no checkpoint, and no process


def test_the_time_until_somebody_restarts_a_dead_job_is_idle(run):
    run.start()
    run.step(0)
    run.now += 100.0  # the supervisor was killed, and wrote nothing
    run.start()
    run.step(0)
    run.end()
    parts = account(run).parts
    assert parts["idle"] == pytest.approx(100.0, abs=1e-5)
    assert parts["restart"] == pytest.approx(2.0, abs=1e-5)  # after a failure
    assert parts["lost work"] == pytest.approx(0.1, abs=1e-5)


def test_what_the_newest_checkpoint_does_not_contain_is_lost_once_a_run_has_failed(run):
    run.start()
    for step in range(4):
        run.step(step)
        if step == 1:
            run.save(2)
    assert account(run).parts["lost work"] > 0  # no process of the attempt runs
    run.end("failed", message="out of memory")
    assert account(run).parts["lost work"] == pytest.approx(0.2, abs=1e-5)


def test_a_hang_is_a_stall_until_it_is_found(run):
    run.start()
    run.step(0)
    run.now += 30.0
    run.write("hang", -1, rank=1, message="rank 1 has made no progress")
    run.end("hang", seconds=2.0)
    parts = account(run).parts
    assert parts["stalled"] == pytest.approx(30.0, abs=1e-5)
    assert parts["restart"] == pytest.approx(2.0, abs=1e-5)


def test_the_wait_for_a_slow_rank_is_a_straggler(run):
    run.start()
    for step in range(10):
        run.step(step, own={1: {"forward": 0.13}})
    run.end()
    parts = account(run).parts
    assert parts["straggler"] == pytest.approx(1.0, abs=1e-5)
    assert parts["exposed communication"] == pytest.approx(10 * PHASES["sync"], abs=1e-5)


def test_the_excess_of_a_slow_rank_0_is_a_straggler(tmp_path):
    run = RecordedRun(tmp_path / "run", ranks=3)
    run.start()
    for step in range(10):
        run.step(step, own={0: {"backward": 0.24}})
    run.end()
    parts = account(run).parts
    assert parts["straggler"] == pytest.approx(2.0, abs=1e-5)
    assert parts["productive"] == pytest.approx(0.75, abs=1e-5)


def test_the_bubble_of_the_schedule_is_separated_from_communication(run):
    run.start(pipeline={"bubble": 0.1})
    for step in range(10):
        run.step(step)
    run.end()
    parts = account(run).parts
    assert parts["bubble"] == pytest.approx(10 * 0.1 * 0.085, abs=1e-5)
    assert parts["bubble"] + parts["exposed communication"] == pytest.approx(0.15, abs=1e-5)


def test_skipped_steps_and_counted_steps_have_their_own_parts(run):
    run.start()
    for step in range(10):
        extra = {"skipped": True} if step == 3 else {"counted": True} if step == 5 else {}
        run.step(step, own={rank: {"forward": 0.53} for rank in (0, 1)} if step == 5 else None, **extra)
    run.end()
    parts = account(run).parts
    assert parts["skipped"] == pytest.approx(0.1, abs=1e-5)
    assert parts["bookkeeping"] == pytest.approx(0.5, abs=1e-5)


def test_compilation_is_separated_from_start_and_first_step(run):
    run.start(seconds=5.0, compile=True)
    for step in range(5):
        slow = {rank: {"forward": 2.03} for rank in (0, 1)} if step == 0 else None
        run.step(step, own=slow, **({"outside": {"start": 2.0, "warmup": 3.0}} if step == 0 else {}))
    run.end()
    parts = account(run).parts
    assert parts["compile"] == pytest.approx(5.0, abs=1e-4)
    assert parts["start"] == pytest.approx(2.0, abs=1e-4)


def test_steps_whose_records_are_lost_have_the_parts_of_the_next_one(run):
    run.start()
    for step in range(10):
        run.step(step)
    path = run.folder.events(0)
    lines = [line for line in path.read_text().splitlines() if json.loads(line).get("step") not in (4, 5, 6)]
    path.write_text("\n".join(lines) + "\n" + '{"kind":"step","step":1')  # and a torn line
    run.end()
    parts = account(run).parts
    assert parts["productive"] == pytest.approx(0.75, abs=1e-5)
    assert parts["bookkeeping"] == pytest.approx(0.0, abs=1e-5)
    assert account(run).unique_samples == 10 * 16


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_between_attempts_does_not_break_the_account(run, jump):
    run.start()
    run.step(0)
    run.end("failed", message="killed")
    run.now += jump
    run.start(restart=1)
    run.step(0)
    run.end()
    result = account(run)
    assert result.parts["productive"] == pytest.approx(0.075, abs=1e-5)
    assert result.parts["restart"] == pytest.approx(3.0 + max(0.0, jump), abs=1e-4)
    assert [("behind" in note) for note in result.notes] == ([True] if jump < 0 else [])


def test_a_clock_that_is_set_back_during_an_attempt_does_not_break_the_account(run):
    run.start()
    run.step(0)
    run.now -= 1000.0
    run.step(1)
    run.end()
    result = account(run)
    assert result.parts["productive"] == pytest.approx(0.15, abs=1e-5)
    assert result.parts["end"] == pytest.approx(1.0, abs=1e-5)
    assert "set back" in result.notes[0]


def test_the_step_in_progress_of_a_live_run_is_accounted_for(run):
    run.start()
    for step in range(5):
        run.step(step)
    run.hold()
    quick, late = account(run, run.now + 0.05), account(run, run.now + 60.0)
    assert quick.wall_seconds == pytest.approx(2.55, abs=1e-4)
    assert quick.parts["stalled"] == 0
    assert late.parts["stalled"] == pytest.approx(59.9, abs=1e-4)
    run.beat(0, "evaluate", 4)
    assert account(run, run.now + 60.0).parts["evaluation"] == pytest.approx(60.0, abs=1e-4)


def test_account_of_a_run_without_steps(run):
    assert account(run).wall_nanoseconds == 0
    run.start(seconds=4.0)
    run.end("failed", message="no data")
    assert known(account(run)) == pytest.approx({"start": 5.0})


def test_a_command_that_finds_the_run_complete_is_not_part_of_it(run):
    run.start()
    run.step(0)
    run.end()
    before = account(run)
    run.now += 1000.0
    run.start()
    run.end()
    assert account(run).nanoseconds == before.nanoseconds
