"""Runs of reinforcement learning from end to end: prompts, rewards and models of a user's, layouts, and other verbs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright
from examples.rl_reward import PROMPTS, reward
from meshwright import train
from meshwright.base.checkpoint.listing import RunLineage, list_published, open_run_store
from meshwright.base.cli.main import main
from meshwright.base.config.rl import TASK_NAMES
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.character_tokenizer import CHARACTERS
from meshwright.core.data.source import FINGERPRINT_SAMPLES, spaced_indices
from meshwright.core.trainer.identity import read_identity
from meshwright.errors import ConfigError, DataError, IdentityError
from meshwright.prover.replay.api import bisect
from meshwright.rl.policy.launch_rollouts import validate_rollouts
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.tasks.registry import TASKS
from tests.kit.small_run import load_cpu_config, step_records

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rl.toml"
SMALL = (
    *("--model.width=32", "--model.ffn=48", "--model.heads=2", "--model.kv_heads=2"),
    *("--model.vocab=64", "--data.sequence=32", "--optimizer.lr=3e-3"),
    *("--batch.global=8", "--batch.micro=4", "--rl.group_size=4", "--rl.staleness=0", "--rl.policy=fixed"),
    *("--checkpoint.every=1", "--checkpoint.seconds=0", "--checkpoint.mode=sync"),
    *("--launch.device=cpu", "--launch.threads=1", "--launch.collective_timeout=60", "--compile.enabled=false"),
)
STEPS = 2


def rl_config(*overrides: str, steps: int = STEPS, ranks: int = 1):
    return load_cpu_config(EXAMPLE, [*SMALL, *overrides], steps=steps, ranks=ranks)


def rollouts(folder: Path) -> list[dict]:
    return [event for event in read_events(RunFolder(folder).events(0)) if event["kind"] == "rollouts"]


def newest_cursor(folder: Path) -> RolloutCursor:
    run = RunFolder(folder)
    entry = list_published(open_run_store(run), RunLineage.from_identity(read_identity(run)))[0]
    return RolloutCursor.from_json(entry.manifest.data)


class Recurrent(nn.Module):
    """A model of a user's: token ids -> logits."""

    def __init__(self, outputs: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.recurrence = nn.GRU(16, 16, batch_first=True)
        self.output = nn.Linear(16, outputs)

    def forward(self, tokens):
        return self.output(self.recurrence(self.embedding(tokens))[0])


class Blocks(Recurrent):
    """A model with blocks, which FSDP shards one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrence = None
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.output(hidden)


class Pooled(Recurrent):
    """Not a policy: it returns logits of the last position alone."""

    def forward(self, tokens):
        return super().forward(tokens)[:, -1]


@pytest.fixture(scope="module")
def undivided(tmp_path_factory):
    """The example on one rank, in float64: layouts are compared with it."""
    return train(rl_config("--precision.compute=fp64"), run=tmp_path_factory.mktemp("rl") / "run", quiet=True)


def test_every_generated_rollout_is_trained_dropped_or_in_flight(undivided):
    cursor = newest_cursor(undivided.folder)
    counts = cursor.counts
    assert cursor.step == STEPS
    assert counts.trained.rollouts == STEPS * 8
    assert counts.generated == sum(counts.dropped.values(), counts.trained) + counts.in_flight
    trained = [group for event in rollouts(undivided.folder) for group, *_ in event["groups"]]
    assert trained == sorted(set(trained)), "every group once, in the order of their numbers"


@pytest.mark.parametrize(
    "layout",
    [
        ("--layout.shard=parameters",),
        ("--layout.tensor=2",),
        pytest.param(("--layout.pipeline=2",), marks=pytest.mark.long),
        pytest.param(("--layout.context=2",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_layouts_train_the_same_rollouts_to_the_same_loss(undivided, tmp_path, layout):
    config = rl_config("--precision.compute=fp64", "--batch.micro=2", *layout, ranks=2)
    result = train(config, run=tmp_path / "run", quiet=True)
    expected = rollouts(undivided.folder)
    assert [event["groups"] for event in rollouts(result.folder)] == [event["groups"] for event in expected]
    assert [event["rewards"] for event in rollouts(result.folder)] == [event["rewards"] for event in expected]
    one, other = step_records(undivided.folder), step_records(result.folder)
    assert all(other[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-9) for step in one)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        ("--layout.shard=parameters", "--layout.tensor=2"),
        ("--layout.pipeline=2", "--layout.tensor=2"),
        ("--layout.shard=optimizer", "--layout.context=2"),
    ],
    ids=" ".join,
)
def test_hybrid_layouts_train_the_same_rollouts(undivided, tmp_path, layout):
    config = rl_config("--precision.compute=fp64", "--batch.micro=2", *layout, ranks=4)
    result = train(config, run=tmp_path / "run", quiet=True)
    assert [event["groups"] for event in rollouts(result.folder)] == [
        event["groups"] for event in rollouts(undivided.folder)
    ]


def test_kl_to_the_initial_policy_is_measured(tmp_path):
    result = train(rl_config("--rl.kl=0.05"), run=tmp_path / "run", quiet=True)
    steps = step_records(result.folder)
    assert steps[0]["metrics"]["kl"] == 0, "the first policy is the reference"
    assert steps[STEPS - 1]["metrics"]["kl"] > 0


def test_prompts_and_reward_of_a_user_from_python(tmp_path):
    config = rl_config("--model.vocab=256", "--rl.task=echo")
    result = train(config, source=PROMPTS, reward=reward, run=tmp_path / "run", quiet=True)
    assert {prompt for event in rollouts(result.folder) for *_, prompt in event["groups"]} <= set(range(len(PROMPTS)))

    def other_reward(item, completion):
        return float(len(completion)) + len(item["answer"])

    longer = rl_config("--model.vocab=256", "--rl.task=echo", steps=3)
    with pytest.raises(IdentityError, match="reward"):
        train(longer, source=PROMPTS, reward=other_reward, run=result.folder, quiet=True)


def test_prompts_and_reward_of_a_user_from_the_command_line(tmp_path):
    options = [*SMALL, "--model.vocab=256", "--rl.task=echo", "--ranks=1", "--steps=1", f"--run={tmp_path / 'run'}"]
    entry_points = ["--source", "rl_reward:PROMPTS", "--reward", "rl_reward:reward"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "rl.toml", *options, *entry_points],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rollouts(tmp_path / "run")) == 1


def test_prompts_of_a_user_do_not_have_the_name_of_a_task(tmp_path):
    """The name of a task stands for its prompts and its tokenizer, which `sample` uses."""
    result = train(rl_config("--model.vocab=256"), source=PROMPTS, reward=reward, run=tmp_path / "run", quiet=True)
    assert 'task = "list"' in (result.folder / "run.toml").read_text()
    assert set(TASK_NAMES) == set(TASKS)


@pytest.mark.parametrize("model", [Recurrent, pytest.param("llama", marks=pytest.mark.long)])
def test_model_of_a_user_trains(tmp_path, model):
    if model == "llama":
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    else:
        torch.manual_seed(0)
        module = model()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    result = train(rl_config(), model=module, run=tmp_path / "run", quiet=True)
    assert result.model is module
    assert any(not torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


@pytest.mark.long
def test_model_of_a_user_trains_under_fsdp(tmp_path):
    config = rl_config("--layout.shard=parameters", ranks=2)
    assert train(config, model=Blocks, run=tmp_path / "run", quiet=True).steps == STEPS


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Pooled, r"returns a tensor of shape \(2, 64\)"),
        (lambda: Recurrent(outputs=8), r"returns logits of shape \(2, 32, 8\).*48 tokens"),
    ],
)
def test_model_that_is_no_policy_is_refused_before_the_run(tmp_path, model, message):
    with pytest.raises(ConfigError, match=message):
        train(rl_config(), model=model, run=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "attempts").exists()


def test_prompt_that_cannot_be_used_ends_the_run_and_is_named(tmp_path):
    """The first prompts are read before the run; others are found when the stream reaches them."""
    read_before = set(spaced_indices(1000, FINGERPRINT_SAMPLES))
    prompts = [{"prompt": "ab" if index in read_before else "x" * 100, "answer": "a"} for index in range(1000)]
    with pytest.raises(DataError, match=r"the prompt has 100 tokens.*try a larger data.sequence"):
        train(rl_config("--model.vocab=256"), source=prompts, reward=reward, run=tmp_path / "run", quiet=True)


def test_reward_that_always_fails_ends_the_run_and_is_named(tmp_path):
    def reward(item, completion):
        raise KeyError(item["task"] + completion)

    with pytest.raises(DataError, match=r"group \d+ has no reward: the reward raised KeyError.*test_rl_runs.py"):
        train(rl_config("--rl.filter_budget=4"), reward=reward, run=tmp_path / "run", quiet=True)


def test_finished_run_is_extended(tmp_path):
    """The second job has a new rollout service, which continues from the log of the first."""
    train(rl_config(), run=tmp_path / "run", quiet=True)
    extended = train(rl_config(steps=4), run=tmp_path / "run", quiet=True)
    whole = train(rl_config(steps=4), run=tmp_path / "whole", quiet=True)
    assert extended.digest == whole.digest
    assert newest_cursor(extended.folder).counts.trained == newest_cursor(whole.folder).counts.trained


def exit_code_of(*args: str) -> int:
    """Runs a verb in this process, and returns its exit code."""
    try:
        main(args)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_sample_uses_the_tokenizer_of_the_task(undivided):
    [answer] = meshwright.sample(undivided.folder, "reverse ab=", tokens=4)
    assert len(answer.tokens) <= 4
    assert set(answer.text) <= {*CHARACTERS, "\ufffd"}


def test_weights_of_a_run_are_exported_and_adapted(undivided, tmp_path):
    assert exit_code_of("checkpoint", "export", str(undivided.folder), "--to", str(tmp_path / "exported")) == 0
    config = rl_config("--lora.rank=4")
    result = train(config, init_from=tmp_path / "exported", run=tmp_path / "run", quiet=True)
    assert step_records(result.folder)[STEPS - 1]["grad_norm"] > 0


def test_verbs_without_a_meaning_are_refused_in_one_line(undivided, capsys):
    run = str(undivided.folder)
    assert exit_code_of("evaluate", run, "--ranks", "1") == 2
    assert exit_code_of("replay", run, "--step", "1") == 2
    assert exit_code_of("data", "show", str(EXAMPLE), "--step", "1") == 2
    assert exit_code_of("data", "show", run, "--step", "100") == 2
    assert exit_code_of("evaluate", run, "--data.path=README.md") == 2
    assert exit_code_of("evaluate", run, "--data.kind=text", "--data.path=README.md") == 2
    messages = capsys.readouterr().err.strip().splitlines()
    assert len(messages) == 6
    assert "data.path = README.md has no effect: data.kind is" in messages[4]
    assert "the tokens of the run are the characters of its task" in messages[5]
    assert "known once they are generated" in messages[2]
    assert "no rollouts of step 100" in messages[3]
    assert "prompts have no targets" in messages[0]
    assert "cannot be replayed" in messages[1]


def test_bisect_compares_runs_without_a_replay(undivided, tmp_path, capsys):
    other = train(rl_config("--precision.compute=fp64", "--seed=4"), run=tmp_path / "run", quiet=True)
    difference = bisect(undivided.folder, other.folder)
    assert difference.recorded_step == 0
    assert difference.reproduced is None
    exit_code_of("bisect", str(undivided.folder), str(other.folder))
    assert "seed" in capsys.readouterr().out


def test_several_hosts_and_torchrun_are_refused(monkeypatch):
    config = rl_config("--launch.hosts=2", ranks=2)
    with pytest.raises(ConfigError, match="several hosts or under torchrun is unsupported"):
        validate_rollouts(config, validate(config)[1])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = rl_config()
    with pytest.raises(ConfigError, match="several hosts or under torchrun is unsupported"):
        validate_rollouts(config, validate(config)[1])
