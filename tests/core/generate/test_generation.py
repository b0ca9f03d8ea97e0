"""Generated tokens are those of transformers and of forward passes without a cache, in every family and batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.base.config import ModelConfig
from meshwright.base.models.registry import FAMILIES, model_spec
from meshwright.core.generate.cache import CachePositions, with_cache
from meshwright.core.generate.generation import core_names, generate
from meshwright.core.generate.sampling import TokenSampler
from meshwright.core.generate.settings import SamplingConfig
from meshwright.core.models.init import build_model
from meshwright.errors import ConfigError
from tests.kit.family_models import MODELS, same_model

PROMPTS = [[5, 1, 7, 3], [9], [2, 8]]
GREEDY = SamplingConfig(tokens=7, temperature=0.0)
FAMILY_MODELS = {config.family: config for config in reversed(MODELS.values())}


def random_model(config: ModelConfig) -> torch.nn.Module:
    model = build_model(config, 0, torch.float64).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def texts(model, spec, prompts, config, end_tokens=()) -> list[list[int]]:
    steps = list(generate(model, spec, prompts, config, end_tokens))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def test_every_family_is_sampled():
    assert FAMILY_MODELS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache_equal_those_without(name):
    """Prompts of different lengths, then tokens one by one at a position per row."""
    config = MODELS[name]
    model, spec = random_model(config), model_spec(config)
    tokens = torch.randint(config.vocab, (3, 11), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([4, 1, 2])
    with torch.no_grad():
        full = model.decoder(tokens)
        modules = dict(model.named_modules())
        with with_cache(model, core_names(model, spec), 11) as cache:
            cache.move_to(CachePositions(0, 4, tokens.device))
            hidden = model.decoder(tokens[:, :4])
            for row, length in enumerate(lengths.tolist()):
                torch.testing.assert_close(hidden[row, :length], full[row, :length], rtol=1e-10, atol=1e-10)
            for step in range(7):
                rows = lengths + step
                cache.move_to(CachePositions(4 + step, 1, tokens.device, rows))
                hidden = model.decoder(tokens.gather(1, rows[:, None]))[:, 0]
                expected = full[torch.arange(3), rows]
                torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-10)
        assert dict(model.named_modules()) == modules
        torch.testing.assert_close(model.decoder(tokens), full, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    config = FAMILY_MODELS[family]
    ours, theirs = same_model(config, torch.float32, tmp_path)
    theirs = theirs.eval()
    found = texts(ours.eval(), model_spec(config), PROMPTS, GREEDY)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        given = torch.tensor([prompt])
        options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = theirs.generate(given, attention_mask=torch.ones_like(given), **options)
        assert tokens == expected[0, len(prompt) :].tolist()


LLAMA = MODELS["llama"]


def test_a_prompt_gets_the_same_tokens_in_every_batch():
    model, spec = random_model(LLAMA), model_spec(LLAMA)
    config = SamplingConfig(tokens=7, top_k=50, top_p=0.95, seed=3)
    together = texts(model, spec, PROMPTS, config)
    assert [texts(model, spec, [prompt], config)[0] for prompt in PROMPTS] == together
    assert texts(model, spec, PROMPTS[::-1], config) == together[::-1]
    assert texts(model, spec, PROMPTS, config) == together
    assert texts(model, spec, PROMPTS, replace(config, seed=4)) != together


def test_equal_prompts_of_a_batch_get_different_tokens():
    model, spec = random_model(LLAMA), model_spec(LLAMA)
    first, second = texts(model, spec, [PROMPTS[0]] * 2, SamplingConfig(tokens=7))
    assert first != second
    assert texts(model, spec, [PROMPTS[0]], SamplingConfig(tokens=7)) == [first]


def test_a_text_ends_at_an_end_token():
    model, spec = random_model(LLAMA), model_spec(LLAMA)
    unlimited = texts(model, spec, PROMPTS, GREEDY)
    ends = {unlimited[0][2], unlimited[1][3]}
    for row, tokens in enumerate(texts(model, spec, PROMPTS, GREEDY, ends)):
        stop = next((index + 1 for index, token in enumerate(unlimited[row]) if token in ends), len(unlimited[row]))
        assert tokens == unlimited[row][:stop]


def test_top_k_and_top_p_choose_from_the_most_likely_tokens():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).expand(400, -1)
    prompts = [[number] for number in range(400)]
    for options, allowed in (
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {1}),
        ({"top_p": 0.7}, {1, 2}),
    ):
        assert set(TokenSampler(SamplingConfig(**options), prompts).choose(logits).tolist()) == allowed
    counts = TokenSampler(SamplingConfig(), prompts).choose(logits).bincount(minlength=4) / 400
    torch.testing.assert_close(counts, logits[0].softmax(0), rtol=0, atol=0.08)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 has no token; expected some text"),
        ([[97]], {}, "prompt 0 has token 97, and the model has 97 tokens"),
        ([[1]], {"tokens": 0}, "--tokens 0 is out of range; expected 1 to 1,048,576"),
        ([[1]], {"temperature": -1.0}, "--temperature -1.0 is out of range"),
        ([[1]], {"temperature": float("nan")}, "--temperature nan is out of range"),
        ([[1]], {"top_p": 0.0}, "--top-p 0.0 is out of range"),
        ([[1]], {"top_k": -1}, "--top-k -1 is out of range"),
    ],
)
def test_wrong_arguments_are_refused(prompts, options, message):
    with pytest.raises(ConfigError) as error:
        list(generate(random_model(LLAMA), model_spec(LLAMA), prompts, SamplingConfig(**options)))
    assert message in str(error.value)


def test_learned_positions_limit_the_tokens():
    config = MODELS["gpt2"]
    with pytest.raises(ConfigError, match=r"a prompt of 4 tokens and --tokens 9 exceed the 12 positions .*--tokens 8"):
        list(generate(random_model(config), model_spec(config), PROMPTS, replace(GREEDY, tokens=9)))
