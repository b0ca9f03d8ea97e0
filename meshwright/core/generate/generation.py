"""Generates tokens after prompts of different lengths, with a key-value cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from meshwright.base.models.spec import ModelSpec
from meshwright.core.generate.cache import CachePositions, with_cache
from meshwright.core.generate.sampling import TokenSampler
from meshwright.core.generate.settings import SamplingConfig
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.errors import ConfigError


def generate(
    model: nn.Module,
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    config: SamplingConfig,
    end_tokens: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yields the next token of every prompt, and None for those that have ended, at one of `end_tokens`. `model` is of
    the family of `spec`.
    """
    lengths = [len(prompt) for prompt in prompts]
    check_prompts(prompts, spec, config)
    device = next(model.parameters()).device
    slots = max(lengths) + config.tokens
    sampler = TokenSampler(config, prompts)
    padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    ended = [False] * len(prompts)
    with with_cache(model, core_names(model, spec), slots) as cache:
        cache.move_to(CachePositions(0, padded.shape[1], device))
        last = torch.tensor(lengths, device=device) - 1
        hidden = hidden_states(model, padded.to(device))[torch.arange(len(prompts), device=device), last]
        for step in range(config.tokens):
            tokens = next_tokens(model, sampler, hidden)
            chosen = tokens.tolist()
            answer: list[int | None] = [None if done else token for done, token in zip(ended, chosen, strict=True)]
            yield answer
            ended = [done or token in end_tokens for done, token in zip(ended, chosen, strict=True)]
            if all(ended) or step == config.tokens - 1:
                return
            last = last + 1
            uniform = len(set(lengths)) == 1
            start = max(lengths) + step
            cache.move_to(CachePositions(start, 1, device, None if uniform else last))
            hidden = hidden_states(model, tokens[:, None])[:, 0]


@torch.inference_mode()
def hidden_states(model: nn.Module, tokens: Tensor) -> Tensor:
    decoder = model.get_submodule("decoder")
    hidden: Tensor = decoder(tokens)
    return hidden


@torch.inference_mode()
def next_tokens(model: nn.Module, sampler: TokenSampler, hidden: Tensor) -> Tensor:
    head = model.get_submodule("head")
    assert isinstance(head, HeadLoss)
    return sampler.choose(head.logits(hidden))


def core_names(model: nn.Module, spec: ModelSpec) -> list[str]:
    """The modules that attend after projection and rotation."""
    return [name for name, _ in model.named_modules() if fnmatchcase(name, spec.attention.modules)]


def check_prompts(prompts: Sequence[Sequence[int]], spec: ModelSpec, config: SamplingConfig) -> None:
    """Raises ConfigError for a prompt that the model cannot continue."""
    if not prompts:
        raise ConfigError("there is no prompt", "expected --prompt TEXT")
    vocab = spec.by_name["decoder.embedding.weight"].shape[0]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {number} has no token", "expected some text")
        if max(prompt) >= vocab or min(prompt) < 0:
            raise ConfigError(
                f"prompt {number} has token {max(prompt)}, and the model has {vocab} tokens",
                "expected the tokenizer of the run's data",
            )
    longest = max(map(len, prompts))
    positions = spec.architecture.learned_positions if spec.architecture else 0
    if positions and longest + config.tokens > positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and --tokens {config.tokens} exceed the {positions} positions of the model",
            f"try --tokens {max(1, positions - longest)}" if longest < positions else "try a shorter prompt",
        )
