"""Sampling: a rollout is a function of weights, seed, group and index; its log-probabilities are those of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.base.models.registry import model_spec
from meshwright.errors import ConfigError, NumericsError
from meshwright.rl.generator.policy_model import FamilyPolicy, ModulePolicy
from meshwright.rl.generator.sampling import SamplingSettings, choose_tokens, sample_group
from meshwright.rl.generator.scoring import MicroBatchShape, score
from tests.kit.family_models import MODELS, same_model
from tests.kit.small_policies import PROMPT, family_policy
from tests.rl.generator.group_digest import digest

SETTINGS = SamplingSettings(tokens=6, temperature=0.8, end_tokens=frozenset({9, 40}))
SHAPE = MicroBatchShape(4, 11)


class PlainModel(nn.Module):
    """A user's module without a cache: a mean over the prefix."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out, self.wrapped = nn.Embedding(50, 8), nn.Linear(8, 50), wrapped

    def forward(self, tokens):
        seen = torch.arange(1, tokens.shape[1] + 1)[:, None]
        logits = self.out(self.embedding(tokens).cumsum(1) / seen)
        return SimpleNamespace(logits=logits) if self.wrapped else logits


def texts(completions) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


@pytest.mark.parametrize("name", MODELS)
def test_sampler_logprobs_agree_with_the_scoring_pass(name):
    policy = family_policy(MODELS[name], torch.float64)
    completions = sample_group(policy, PROMPT, 4, SETTINGS, seed=3, group=7)
    scored = score(policy, PROMPT, [completion.tokens for completion in completions], SHAPE, SETTINGS.temperature)
    for completion, logprobs in zip(completions, scored, strict=True):
        np.testing.assert_allclose(completion.sampler_logprobs, logprobs, rtol=1e-9, atol=1e-9)


def test_completion_ends_with_an_end_token_or_is_truncated():
    policy, seen = family_policy(), set()
    for group in range(12):
        for completion in sample_group(policy, PROMPT, 4, SETTINGS, seed=0, group=group):
            tokens = completion.tokens.tolist()
            ended = tokens[-1] in SETTINGS.end_tokens
            seen.add(ended)
            assert completion.truncated is not ended
            assert not SETTINGS.end_tokens & set(tokens[:-1])
            assert ended or len(tokens) == SETTINGS.tokens
            assert len(completion.sampler_logprobs) == len(tokens)
    assert seen == {True, False}


def test_rollout_does_not_depend_on_the_other_rollouts_of_the_batch():
    policy = family_policy(dtype=torch.float64)
    eight = texts(sample_group(policy, PROMPT, 8, SETTINGS, seed=1, group=5))
    assert texts(sample_group(policy, PROMPT, 3, SETTINGS, seed=1, group=5)) == eight[:3]
    assert texts(sample_group(policy, PROMPT, 8, SETTINGS, seed=1, group=6)) != eight
    assert texts(sample_group(policy, PROMPT, 8, SETTINGS, seed=2, group=5)) != eight
    assert len({tuple(tokens) for tokens in eight}) > 1


def test_rows_that_end_do_not_change_the_others():
    """Without end tokens every row is sampled to its limit; the tokens before an end are the same, to the bit."""
    policy = family_policy()
    with_ends = sample_group(policy, PROMPT, 8, SETTINGS, seed=1, group=5)
    without = sample_group(policy, PROMPT, 8, SamplingSettings(6, 0.8), seed=1, group=5)
    assert any(not completion.truncated for completion in with_ends)
    for short, long in zip(with_ends, without, strict=True):
        length = len(short.tokens)
        assert short.tokens.tolist() == long.tokens[:length].tolist()
        assert short.sampler_logprobs.tolist() == long.sampler_logprobs[:length].tolist()


def test_greedy_tokens_are_those_of_the_full_forward_pass():
    policy = family_policy(dtype=torch.float64)
    (completion,) = sample_group(policy, PROMPT, 1, SamplingSettings(5, greedy=True), seed=0, group=0)
    tokens = list(PROMPT)
    for token in completion.tokens.tolist():
        assert token == int(policy.logits(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)


def test_frequencies_of_tokens_are_their_probabilities():
    """The first token of 4,000 rollouts: the largest deviation is within five standard deviations."""
    policy = family_policy(dtype=torch.float64)
    rollouts = 4000
    completions = sample_group(policy, PROMPT, rollouts, SamplingSettings(1, temperature=1.5), seed=0, group=0)
    found = np.bincount([completion.tokens[0] for completion in completions], minlength=97) / rollouts
    logits = policy.logits(torch.tensor([PROMPT]))[0, -1]
    expected = (logits / 1.5).softmax(-1).numpy()
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected / rollouts) + 1e-12).all()


def test_token_without_probability_is_never_chosen():
    logits = torch.tensor([[-1e9, 0.0, -1e9]], dtype=torch.float64)
    for draw in (0.0, 0.5, 1 - 2**-53):
        assert choose_tokens(logits, SETTINGS, torch.tensor([draw], dtype=torch.float64), 0).tolist() == [1]


def test_logits_that_are_not_finite_are_named():
    with pytest.raises(NumericsError, match="group 4: the logits of the policy are not finite"):
        choose_tokens(torch.tensor([[0.0, torch.nan]]), SETTINGS, torch.zeros(1, dtype=torch.float64), 4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_user_module_without_a_cache(wrapped):
    policy = ModulePolicy(PlainModel(wrapped).double())
    assert not policy.has_cache
    completions = sample_group(policy, PROMPT, 4, SETTINGS, seed=3, group=7)
    scored = score(policy, PROMPT, [completion.tokens for completion in completions], SHAPE, SETTINGS.temperature)
    for completion, logprobs in zip(completions, scored, strict=True):
        np.testing.assert_allclose(completion.sampler_logprobs, logprobs, rtol=1e-9, atol=1e-9)


def test_transformers_model_samples_with_its_cache_what_the_family_samples(tmp_path):
    config = MODELS["llama"]
    ours, theirs = same_model(config, torch.float32, tmp_path)
    family, module = FamilyPolicy(ours.double(), model_spec(config)), ModulePolicy(theirs.double())
    assert module.has_cache
    expected = sample_group(family, PROMPT, 4, SETTINGS, seed=3, group=7)
    found = sample_group(module, PROMPT, 4, SETTINGS, seed=3, group=7)
    assert texts(found) == texts(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, rtol=1e-6, atol=1e-6)


def test_model_that_does_not_return_logits_is_refused():
    with pytest.raises(ConfigError, match="expected logits of shape"):
        ModulePolicy(nn.Embedding(50, 8)).logits(torch.tensor([3]))


@pytest.mark.parametrize(("prompt", "message"), [([], "no token"), ([97], "token 97, and the model has 97")])
def test_prompt_that_cannot_be_continued_is_refused(prompt, message):
    with pytest.raises(ConfigError, match=message):
        sample_group(family_policy(), prompt, 2, SETTINGS, seed=0, group=0)


def test_two_processes_generate_the_same_bytes():
    """Of the same weights, seed and group, with all log-probabilities: this process and a new one."""
    root = Path(__file__).parents[3]
    paths = [str(root), str(root / "tests"), str(Path(__file__).parent)]
    program = f"import sys; sys.path[:0] = {paths}; from group_digest import digest; print(digest())"
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert other.strip() == digest()
