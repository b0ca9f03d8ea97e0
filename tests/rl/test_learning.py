"""The reward of the example rises, with every objective, and restarts do not change the rewards of any step."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import meshwright
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from tests.kit.small_run import load_cpu_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl.toml"
STEPS, MARGIN = 40, 0.15
"""Steps of a run, and the smallest rise of the mean reward from its first five steps to its last five. An untrained
model has a mean reward of about 0.14.
"""
EVERY_POLICY_FIXED = ["--rl.policy=fixed", "--launch.device=cpu", "--launch.threads=1", "--log_every=1000"]


def train(folder: Path, *overrides: str, steps: int = STEPS) -> list[list[float]]:
    """The mean rewards of the groups of every step; of a step that was trained again, the last ones."""
    config = load_cpu_config(EXAMPLE, overrides=[*EVERY_POLICY_FIXED, *overrides], ranks=1, steps=steps)
    meshwright.train(config, run=folder, quiet=True)
    events = [event for event in read_events(RunFolder(folder).events(0)) if event["kind"] == "rollouts"]
    rewards = {event["step"]: event["rewards"] for event in events}
    assert sorted(rewards) == list(range(steps))
    return [rewards[step] for step in range(steps)]


def rise(rewards: list[list[float]]) -> float:
    means = [statistics.mean(of_step) for of_step in rewards]
    return statistics.mean(means[-5:]) - statistics.mean(means[:5])


def test_reward_of_the_example_rises(tmp_path):
    assert rise(train(tmp_path / "run")) > MARGIN


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["--rl.objective=policy_gradient"], 60),
        (["--rl.kl=0.01"], 60),
        (["--rl.objective=policy_gradient", "--rl.kl=0.01", "--rl.staleness=0"], 60),
        (["--rl.staleness=3", "--rl.generators=2"], 120),  # older rollouts are clipped more often: a step learns less
    ],
    ids=["policy gradient", "kl", "policy gradient with kl, synchronous", "asynchronous"],
)
def test_reward_rises_with_every_objective(tmp_path, overrides, steps):
    assert rise(train(tmp_path / "run", *overrides, steps=steps)) > MARGIN


@pytest.mark.parametrize("kl", [pytest.param(0.0, marks=pytest.mark.long), 0.01])
def test_rewards_of_a_killed_run_are_those_of_an_undisturbed_one(tmp_path, monkeypatch, kl):
    settings = [f"--rl.kl={kl}", "--checkpoint.seconds=0", "--checkpoint.every=3", "--launch.restarts=20"]
    undisturbed = train(tmp_path / "undisturbed", *settings, steps=10)
    kills = ["step.updated:kill@step4#0", "policy.publish:kill@step5#1", "step.forward:kill@step8#2"]
    monkeypatch.setenv("MESHWRIGHT_FAULT", ",".join(kills))
    killed = train(tmp_path / "killed", *settings, steps=10)
    assert len(list((tmp_path / "killed" / "attempts").iterdir())) == len(kills) + 1
    assert killed == undisturbed
