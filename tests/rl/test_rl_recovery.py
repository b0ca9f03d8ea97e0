"""Runs of reinforcement learning that are killed at every point end with the parameters of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.records.run_folder import RunFolder
from meshwright.rl.policies import PolicyStore, open_policy_store
from tests.rl.rl_runs import (
    SETTINGS,
    STEPS,
    RLRuns,
    assert_rollout_rules,
    cursors,
    final_digest,
    problems,
    processes_left,
    rank_events,
    records,
    run_id,
    temporary_files,
)

LEARNER_POINTS = (
    "step.fetch",
    "step.copy",
    "step.forward",
    "step.backward",
    "step.sync",
    "step.collective",
    "step.update",
    "step.updated",
    "policy.publish",
    "policy.published",
)
SAVE_POINTS = ("save.stage", "save.begin", "save.after_shard", "save.before_manifest", "save.before_publish")
SERVICE_POINTS = ("rollout.append", "rollout.committed")
GENERATOR_POINTS = ("generator.assigned", "generator.generated")


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_learner_that_is_killed_again_and_again_ends_with_the_same_parameters(
    rl_runs: RLRuns, staleness: int
) -> None:
    faults = (
        "step.updated:kill@step1#0,policy.publish:kill@step3#1,policy.published:kill@step5#2,"
        "step.backward:kill@step6#3,save.before_publish:kill@step8#4"
    )
    rl_runs.run(faults, staleness=staleness)
    assert rl_runs.attempts == 6
    rl_runs.assert_equals_undisturbed_run(staleness)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_service_and_generators_that_are_killed_are_replaced(rl_runs: RLRuns, staleness: int) -> None:
    faults = (
        "rollout.append:kill@step4#0,rollout.committed:kill@step6#1,"
        "generator.assigned:kill@step3,generator.generated:kill@step9"
    )
    rl_runs.run(faults, staleness=staleness)
    assert rl_runs.attempts == 3
    rl_runs.assert_equals_undisturbed_run(staleness)


@pytest.mark.parametrize(("fault", "resumed"), [("step.updated:kill@step3", 2), ("step.updated:kill@step1", 0)])
def test_a_restart_keeps_the_generations_of_the_resumed_policy(rl_runs: RLRuns, fault: str, resumed: int) -> None:
    """Groups of a policy that the new attempt continues from are generated once: also those before any checkpoint."""
    rl_runs.run(fault, "--checkpoint.mode=sync", staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)
    groups = [group.group for group in records(rl_runs.folder).values() if group.version.step <= resumed]
    assert groups
    assert len(groups) == len(set(groups))
    last = cursors(rl_runs.folder)[STEPS]
    assert last.counts.dropped["duplicate"].rollouts == last.counts.dropped["stale"].rollouts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_service_that_is_killed_or_stopped_from_outside_is_replaced(rl_runs: RLRuns, number: int) -> None:
    """SIGKILL ends the attempt at once. While the service is stopped, the learner makes no progress: the watchdog ends
    the attempt, and the next one replaces a service that does not answer.
    """
    killer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, pathlib, signal, sys, time\n"
            "lock = pathlib.Path(sys.argv[1], 'rollouts', '.lock')\n"
            "log = pathlib.Path(sys.argv[1], 'rollouts', '00000001.log')\n"
            "while not (log.exists() and log.stat().st_size > 4000): time.sleep(0.01)\n"
            "os.kill(int(lock.read_text()), int(sys.argv[2]))\n",
            str(rl_runs.folder),
            str(int(number)),
        ]
    )
    try:
        rl_runs.run("", "--launch.hang_timeout=10", staleness=1)
    finally:
        killer.kill()
        killer.wait()
    assert rl_runs.attempts == 2
    rl_runs.assert_equals_undisturbed_run(1)


def test_slow_generation_is_no_hang(rl_runs: RLRuns) -> None:
    """A group takes longer than a rank may take without progress, and longer than a collective may take."""
    timeouts = ("--launch.hang_timeout=3", "--launch.collective_timeout=4", "--rl.generator_timeout=60")
    rl_runs.run("generator.assigned:slow=6@step5", *timeouts, staleness=1, ranks=2)
    assert rl_runs.attempts == 1
    assert_rollout_rules(rl_runs.folder, 1)


def test_a_generator_that_hangs_is_replaced(rl_runs: RLRuns) -> None:
    rl_runs.run("generator.generated:hang@step5", "--rl.generator_timeout=2", staleness=1)
    assert rl_runs.attempts == 1
    assert any("a group took more than 2 s" in problem for problem in problems(rl_runs.folder))
    rl_runs.assert_equals_undisturbed_run(1)


def test_newest_policies_of_two_generators_keep_the_staleness_bound(rl_runs: RLRuns) -> None:
    faults = "step.updated:kill@step3#0,policy.published:kill@step5#1,generator.generated:kill@step6"
    rl_runs.run(faults, "--rl.policy=newest", "--rl.generators=2", staleness=2)
    assert rl_runs.attempts == 3
    assert_rollout_rules(rl_runs.folder, 2)


# From the command line: signals, and all processes at once.


def command(folder: Path, *more: str) -> list[str]:
    args = [*SETTINGS, "--rl.staleness=1", "--steps", str(STEPS), "--ranks", "1", "--run", str(folder)]
    return [sys.executable, "-m", "meshwright", "train", *args, *more]


def start_command(runs: RLRuns, fault: str = "") -> subprocess.Popen[bytes]:
    environment = os.environ | {"MESHWRIGHT_FAULT": fault}
    return subprocess.Popen(command(runs.folder), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_step(folder: Path, step: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(event["step"] >= step for event in rank_events_if_any(folder)):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def rank_events_if_any(folder: Path) -> list[dict[str, Any]]:
    return rank_events(folder, "rollouts") if RunFolder(folder).events(0).exists() else []


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(grandchild for child in children for grandchild in descendants(child))]


def test_all_processes_are_killed_at_once_and_the_command_continues(rl_runs: RLRuns) -> None:
    process = start_command(rl_runs, "step.fetch:slow=0.2")
    wait_for_step(rl_runs.folder, 4)
    for pid in descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    assert not processes_left(rl_runs.folder)
    rl_runs.run(staleness=1)  # this launch removes the temporary folders of the killed one
    rl_runs.assert_equals_undisturbed_run(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_stops_the_command_after_a_checkpoint(rl_runs: RLRuns, number: signal.Signals) -> None:
    process = start_command(rl_runs, "step.fetch:slow=0.2")
    wait_for_step(rl_runs.folder, 3)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    done = max(event["step"] for event in rank_events(rl_runs.folder, "step")) + 1
    assert max(cursors(rl_runs.folder)) == done
    assert not temporary_files()
    rl_runs.run(staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)


@pytest.mark.long
def test_a_signal_while_the_learner_waits_for_rollouts_stops_it_after_a_checkpoint(rl_runs: RLRuns) -> None:
    process = start_command(rl_runs, "generator.assigned:hang@step9")
    wait_for_step(rl_runs.folder, 2)
    deadline = time.monotonic() + 60
    log_size = -1
    while (size := (rl_runs.folder / "rollouts" / "00000001.log").stat().st_size) != log_size:
        log_size = size
        assert time.monotonic() < deadline
        time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(25) == 143
    rl_runs.run(staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)


# Other launches of the same run.


def test_a_run_continues_with_other_generators_and_ranks_and_more_steps(rl_runs: RLRuns) -> None:
    first = rl_runs.run(staleness=1, steps=4)
    assert first.steps == 4
    rl_runs.run("", "--rl.generators=2", staleness=1, steps=6)
    result = rl_runs.run(staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)
    policies = PolicyStore(open_policy_store(RunFolder(rl_runs.folder)), run_id(rl_runs.folder)).versions()
    for cursor in cursors(rl_runs.folder).values():  # a run can fall back to every checkpoint that is kept
        assert cursor.step == STEPS or cursor.policies <= set(policies)
    again = rl_runs.run(staleness=1)
    assert again.digest == result.digest
    assert len(rank_events(rl_runs.folder, "rollouts")) == STEPS


def test_the_consumed_groups_do_not_depend_on_the_ranks(rl_runs: RLRuns) -> None:
    rl_runs.run(staleness=1, steps=4)
    result = rl_runs.run("step.updated:kill@step5", staleness=1, ranks=2)
    assert result.steps == STEPS
    assert_rollout_rules(rl_runs.folder, 1)


def test_fresh_begins_a_new_log_and_a_fork_drops_what_is_in_flight(rl_runs: RLRuns) -> None:
    rl_runs.run(staleness=1, steps=4)
    in_flight = cursors(rl_runs.folder)[4].counts.in_flight
    forked = rl_runs.run("step.updated:kill@step5", "--rl.group_size=8", "--rl.kl=0.01", staleness=0, fork=True)
    assert forked.steps == STEPS
    last = cursors(rl_runs.folder)[STEPS]
    assert last.counts.conserved
    assert last.counts.dropped["lost_timeline"].rollouts >= in_flight.rollouts
    assert last.counts.trained.rollouts == STEPS * 8
    assert all(event["staleness"] == 0 for event in rank_events(rl_runs.folder, "rollouts") if event["step"] >= 4)
    rl_runs.run(staleness=1, fresh=True)
    rl_runs.assert_equals_undisturbed_run(1)


def test_a_run_on_samples_is_forked_into_reinforcement_learning(rl_runs: RLRuns) -> None:
    rl_runs.run("", "--rl.objective=none", "--data.kind=synthetic", steps=2)
    forked = rl_runs.run("", "--rl.kl=0.01", steps=4, fork=True)
    assert forked.steps == 4
    assert cursors(rl_runs.folder)[4].counts.trained.rollouts == 2 * 8


# The long form.


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("point", [*LEARNER_POINTS, *SAVE_POINTS, *SERVICE_POINTS, *GENERATOR_POINTS])
def test_a_kill_at_every_point(rl_runs: RLRuns, point: str, ranks: int, staleness: int) -> None:
    step = 4 if point in SAVE_POINTS else 5
    on_all_ranks = point.startswith(("step", "save")) and "before" not in point
    rank = f":rank{ranks - 1}" if on_all_ranks else ""
    rl_runs.run(f"{point}{rank}:kill@step{step}", staleness=staleness, ranks=ranks)
    assert rl_runs.attempts == (1 if point in GENERATOR_POINTS else 2)
    rl_runs.assert_equals_undisturbed_run(staleness, ranks)


LETTERS = "abcdefgh"


def reward_that_hangs_for_b(item: dict[str, Any], completion: str) -> float:
    if item["answer"] == "b":
        time.sleep(1e6)
    return float(len(set(completion)))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("staleness", [0, 1])
def test_thirty_random_kills(rl_runs: RLRuns, tmp_path: Path, staleness: int) -> None:
    """The learner dies 30 times, every tenth generation ends with its generator, and the reward of a prompt hangs."""
    options: dict[str, Any] = {
        "source": [{"prompt": f"say {letter}:", "answer": letter} for letter in LETTERS],
        "reward": reward_that_hangs_for_b,
        "staleness": staleness,
    }
    own = ("--rl.task=echo", "--model.vocab=256", "--rl.reward_timeout=3", "--checkpoint.every=1")
    rl_runs.folder = tmp_path / "undisturbed"
    rl_runs.run("", *own, steps=16, **options)
    expected = final_digest(rl_runs.folder, 16)

    draw = random.Random(20 + staleness)
    # three kills in a row at one step would be called data-dependent, and stop the run
    steps = sorted(draw.sample([step for step in range(16) for _ in range(2)], 30))
    faults = [f"{draw.choice(LEARNER_POINTS)}:kill@step{step}#{restart}" for restart, step in enumerate(steps)]
    faults += [f"{point}:kill@10%x1000" for point in GENERATOR_POINTS]
    rl_runs.folder = tmp_path / "run"
    rl_runs.run(",".join(faults), *own, "--launch.restarts=40", steps=16, **options)
    assert rl_runs.attempts == 31
    assert final_digest(rl_runs.folder, 16) == expected
    assert_rollout_rules(rl_runs.folder, staleness, 16)
    last = cursors(rl_runs.folder)[16].counts
    assert last.dropped["failed"].rollouts > 0
    print(f"staleness {staleness}: {last.to_json()}, {len(problems(rl_runs.folder))} problems")
