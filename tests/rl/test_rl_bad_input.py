"""Runs of reinforcement learning with bad rewards, a damaged log, damaged policies and a full disk."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DataError, MeshwrightError
from meshwright.rl.log.frames import RECORD_HEADER
from meshwright.rl.log.interface import LogPosition
from meshwright.rl.policies import PolicyPublisher
from meshwright.rl.version import PolicyVersion
from tests.rl.rl_runs import STEPS, RLRuns, assert_rollout_rules, cursors, problems, records

PROMPTS = [{"prompt": f"say {letter}:", "answer": letter} for letter in "abcd"]
OWN_REWARD = ("--rl.task=echo", "--model.vocab=256", "--rl.dynamic_sampling=false")


def raises_for_b(item: dict[str, Any], completion: str) -> float:
    if item["answer"] == "b":
        raise ValueError("no reward for b")
    return float(len(set(completion)))


def nan_for_b(item: dict[str, Any], completion: str) -> float:
    return math.nan if item["answer"] == "b" else float(len(set(completion)))


def hangs_for_b(item: dict[str, Any], completion: str) -> float:
    if item["answer"] == "b":
        time.sleep(1e6)
    return float(len(set(completion)))


def always_nan(_item: dict[str, Any], _completion: str) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("reward", "named"),
    [(raises_for_b, "ValueError: no reward for b"), (nan_for_b, "the reward is nan"), (hangs_for_b, "0.3 s")],
)
def test_a_reward_that_fails_is_named_and_its_groups_are_left_out(
    rl_runs: RLRuns, reward: Callable[..., float], named: str
) -> None:
    result = rl_runs.run(
        "step.updated:kill@step3", *OWN_REWARD, "--rl.reward_timeout=0.3", staleness=1, source=PROMPTS, reward=reward
    )
    assert result.steps == STEPS
    assert any(named in problem for problem in problems(rl_runs.folder)), problems(rl_runs.folder)
    assert_rollout_rules(rl_runs.folder, 1)
    assert cursors(rl_runs.folder)[STEPS].counts.dropped["failed"].rollouts > 0
    failed = {group.group for group in records(rl_runs.folder).values() if group.failed}
    assert {group.prompt_id for group in records(rl_runs.folder).values() if group.group in failed} == {1}


def test_a_reward_that_always_fails_stops_the_run_with_the_filter_budget(rl_runs: RLRuns) -> None:
    with pytest.raises(DataError, match=r"rl\.filter_budget = 5.* have no reward.*try the reward function"):
        rl_runs.run("", *OWN_REWARD, "--rl.filter_budget=5", source=PROMPTS, reward=always_nan)
    assert any("the reward is nan" in problem for problem in problems(rl_runs.folder))
    assert rl_runs.attempts == 1


def test_the_rollout_log_of_another_run_is_refused(rl_runs: RLRuns, tmp_path: Path) -> None:
    rl_runs.run(staleness=1, steps=4)
    ours = rl_runs.folder / "rollouts" / "00000001.log"
    mine = ours.read_bytes()
    other, rl_runs.folder = rl_runs.folder, tmp_path / "other"
    rl_runs.run(staleness=1, steps=2)
    shutil.copy(rl_runs.folder / "rollouts" / "00000001.log", ours)
    rl_runs.folder = other
    with pytest.raises(DataError, match=r"00000001\.log is the rollout log of another run"):
        rl_runs.run(staleness=1)
    ours.write_bytes(mine)
    rl_runs.run(staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)


def flip_byte(folder: Path, position: LogPosition) -> None:
    """Damages the payload of a record."""
    path = folder / "rollouts" / f"{position.segment:08d}.log"
    content = bytearray(path.read_bytes())
    content[position.offset + RECORD_HEADER.size + 20] ^= 1
    path.write_bytes(content)


def test_a_damaged_record_of_a_consumed_group_changes_nothing(rl_runs: RLRuns) -> None:
    rl_runs.run(staleness=1, steps=4)
    flip_byte(rl_runs.folder, min(records(rl_runs.folder)))
    rl_runs.run(staleness=1)
    assert rl_runs.final_digest() == rl_runs.golden(1)


def test_a_damaged_record_in_flight_is_named_counted_and_generated_again(rl_runs: RLRuns) -> None:
    rl_runs.run("", "--checkpoint.mode=sync", staleness=1, steps=4)
    cursor = cursors(rl_runs.folder)[4]
    log = records(rl_runs.folder)
    # a record that is in flight at the cursor, or one that came after it
    in_flight = [position for _, position in cursor.in_flight]
    later = [position for position, group in log.items() if position >= cursor.position and group.group >= 8]
    position = (in_flight or later)[0]
    flip_byte(rl_runs.folder, position)
    rl_runs.run(staleness=1)
    assert rl_runs.final_digest() == rl_runs.golden(1)
    assert any(f"damaged at {position}" in problem for problem in problems(rl_runs.folder))
    last = cursors(rl_runs.folder)[STEPS].counts
    assert last.conserved
    assert last.dropped["damaged"].rollouts == (4 if in_flight else 0)


def test_a_record_that_is_damaged_while_the_learner_waits_is_generated_again(rl_runs: RLRuns) -> None:
    """The learner cannot read it; the next attempt finds the damage, and generates the group again."""

    def damage(self: Any, position: LogPosition) -> Any:
        if self.job.restart == 0 and position.offset > 3000:
            flip_byte(rl_runs.folder, position)
        return read(self, position)

    from meshwright.rl.policy.rollouts import RolloutLoader

    read = RolloutLoader._read
    rl_runs.monkeypatch.setattr(RolloutLoader, "_read", damage)
    rl_runs.run(staleness=1)
    assert rl_runs.attempts == 2
    assert rl_runs.final_digest() == rl_runs.golden(1)
    assert any("damaged at" in problem for problem in problems(rl_runs.folder))


def test_a_full_disk_is_named_and_nothing_is_lost(rl_runs: RLRuns) -> None:
    rl_runs.run("rollout.append:enospc@step5,rollout.append:enospc@step6", staleness=1)
    assert any("No space left on device" in problem for problem in problems(rl_runs.folder))
    assert rl_runs.attempts == 1
    rl_runs.assert_equals_undisturbed_run(1)


def test_a_disk_that_stays_full_stops_the_run(rl_runs: RLRuns) -> None:
    with pytest.raises(DataError, match=r"could not be written for 2 s.*No space left on device"):
        rl_runs.run("rollout.append:enospc@step5+", "--launch.hang_timeout=2", staleness=1)
    rl_runs.run(staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)


@pytest.fixture
def small_disk(rl_runs: RLRuns) -> Iterator[Path]:
    """The folder of the runs as a file system of its own with 1 MB."""
    folder = rl_runs.folder
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("left", [48_000, 96_000, 160_000])
def test_a_file_system_that_is_really_full_loses_nothing(rl_runs: RLRuns, small_disk: Path, left: int) -> None:
    rl_runs.run(staleness=1, steps=2)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - left))
    with pytest.raises(MeshwrightError, match="No space left on device"):
        rl_runs.run("", "--launch.hang_timeout=4", staleness=1)
    ballast.unlink()
    rl_runs.run(staleness=1)
    rl_runs.assert_equals_undisturbed_run(1)


@pytest.mark.parametrize("deleted", [False, True])
def test_policies_that_are_damaged_or_deleted_are_published_again(rl_runs: RLRuns, deleted: bool) -> None:
    rl_runs.run(staleness=0, steps=4)
    policies = rl_runs.folder / "policies"
    if deleted:
        shutil.rmtree(policies)
    else:
        shards = [path for path in policies.rglob("*") if path.is_file() and path.name != "manifest.json"]
        assert shards
        for shard in shards:
            content = shard.read_bytes()
            shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    rl_runs.run(staleness=0)
    rl_runs.assert_equals_undisturbed_run(0)


@pytest.mark.long
def test_a_policy_that_is_damaged_before_a_generator_reads_it_is_published_by_another_attempt(rl_runs: RLRuns) -> None:
    publish = PolicyPublisher.publish

    def damage(self: PolicyPublisher, version: PolicyVersion) -> str:
        digest = publish(self, version)
        if version == PolicyVersion(1, 5):
            for shard in (rl_runs.folder / "policies").rglob("*00005*/*"):
                shard.write_bytes(shard.read_bytes()[:-9] + bytes(9))
        return digest

    rl_runs.monkeypatch.setattr(PolicyPublisher, "publish", damage)
    rl_runs.run()
    assert rl_runs.attempts == 2
    assert any("policy 1.5" in problem for problem in problems(rl_runs.folder))
    rl_runs.assert_equals_undisturbed_run(0)


def test_a_policy_that_is_needed_and_gone_stops_the_run_with_its_name(rl_runs: RLRuns) -> None:
    """Under rl.policy = fixed, no other policy may take its place."""
    rl_runs.run(staleness=1, steps=4)
    (rl_runs.folder / "rollouts" / "00000001.log").rename(rl_runs.folder / "log")
    content = (rl_runs.folder / "log").read_bytes()
    cursor = cursors(rl_runs.folder)[4]
    (rl_runs.folder / "rollouts" / "00000001.log").write_bytes(content[: cursor.position.offset])
    for _, position in cursor.in_flight:
        flip_byte(rl_runs.folder, position)
    shutil.rmtree(rl_runs.folder / "policies")
    rl_runs.monkeypatch.setattr("meshwright.rl.service.server.MAX_UNAVAILABLE", 3)  # a second passes between two
    with pytest.raises(
        MeshwrightError, match=r"could not load a policy 3 times in a row: .*policy 1\.3 is not published"
    ):
        rl_runs.run("", "--launch.restarts=0", staleness=1)
