"""A reward of the user's: its checks, its place in the identity of a run, the command line, and the examples."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.base.cli.args import parse
from meshwright.base.config import RLConfig, RunConfig, load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.base.user_code.entry_points import load_user_code
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.cli.train import train as train_verb
from meshwright.core.launch.job import make_job
from meshwright.core.launch.user_code.code_record import build_update_record
from meshwright.core.launch.user_code.update import open_user_update
from meshwright.errors import ConfigError
from meshwright.rl.rewards.user_reward import open_reward
from meshwright.rl.rewards.worker import CompletionText, RewardWorker
from meshwright.rl.tasks.answer_reward import answer_reward
from meshwright.rl.tasks.prompt_source import open_prompt_source

EXAMPLES = Path(__file__).parents[3] / "examples"
GRPO = RunConfig(rl=RLConfig(objective="grpo"))


def first(item, completion):
    return 1.0


def second(item, completion):
    return 2.0


def test_reward_of_a_run_is_that_of_its_task_or_the_users():
    assert open_reward(RunConfig(), UserCode()) is None
    assert open_reward(GRPO, UserCode()) is answer_reward
    assert open_reward(GRPO, UserCode(reward=first)) is first
    assert open_reward(GRPO, UserCode(reward=first, source=[{"prompt": "a"}])) is first


@pytest.mark.parametrize(
    ("config", "user", "message"),
    [
        (RunConfig(), UserCode(reward=first), "a reward is given, and rl.objective = none"),
        (GRPO, UserCode(source=[{"prompt": "a"}]), "prompts of your own are given without a reward"),
        (GRPO, UserCode(reward=3), "the reward is a int"),
        (GRPO, UserCode(reward=lambda item: 1.0), "cannot be called with (item, completion)"),
    ],
)
def test_reward_that_is_missing_or_unused_is_an_error(config, user, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_reward(config, user)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_job(config, RunFolder(tmp_path / "run"), user)


def test_code_of_a_reward_is_part_of_the_identity():
    records = [build_update_record(UserCode(reward=function)) for function in (first, second, first)]
    assert records[0]["fingerprint"] == records[2]["fingerprint"] != records[1]["fingerprint"]
    assert any("first" in part for part in records[0]["parts"])
    layout = Layout.from_config(GRPO.layout)
    assert open_user_update(GRPO, UserCode(reward=first), layout)[1].code == records[0]
    assert open_user_update(GRPO, UserCode(), layout)[1].code is None


def test_command_line_names_a_reward(monkeypatch):
    parsed = parse(train_verb, "train", ["--reward", "rl_reward:reward"])
    assert parsed["training_entry_points"] == {"reward": "rl_reward:reward"}
    monkeypatch.syspath_prepend(str(EXAMPLES))
    user = load_user_code({"reward": "rl_reward:reward", "source": "rl_reward:PROMPTS"})
    assert callable(user.reward)
    assert len(user.source) == 4


def test_example_run_has_prompts_that_fit():
    config = load_config(EXAMPLES / "rl.toml")
    validate(config)
    assert config.rl.enabled
    source = open_prompt_source(config)
    assert source[0].item["text"].startswith("copy ")


def test_example_reward_scores_its_prompts():
    example = importlib.import_module("examples.rl_reward")
    config = load_config(EXAMPLES / "rl.toml", overrides=["--model.vocab=256", "--rl.task=echo"])
    source = open_prompt_source(config, example.PROMPTS)
    assert source.name == "echo"
    with RewardWorker(example.reward) as worker:
        texts = ["a", "ab", "b", "xyz", ""]
        rewards = worker.score(source[0].item, [CompletionText(text, [1]) for text in texts], 30)
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] == 1.0
    assert replace(config).model.vocab >= source.tokenizer.vocab


def test_item_that_is_not_plain_data_is_a_failure():
    with RewardWorker(first) as worker:
        assert "cannot be sent" in worker.score({"object": object()}, [CompletionText("a", [1])], 30).text
        assert worker.score({}, [CompletionText("a", [1])], 30) == [1.0]
