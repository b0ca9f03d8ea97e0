"""Samples the completions of a group. The random numbers of a rollout depend on the seed, its group and its index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import ConfigError, NumericsError
from meshwright.rl.generator.policy_model import PolicyModel
from meshwright.rl.logprobs import token_logprobs
from meshwright.rl.rollout import LogProbs, Tokens


@dataclass(frozen=True)
class SamplingSettings:
    """How a group is sampled."""

    tokens: int
    """most tokens of a completion"""
    temperature: float = 1.0
    end_tokens: frozenset[int] = frozenset()
    """tokens that end a completion, which contains them"""
    greedy: bool = False
    """choose the most likely token, as an evaluation does; log-probabilities are still those at the temperature"""

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"a completion has {self.tokens} tokens at temperature {self.temperature}",
                "expected at least one token, and a temperature above 0",
            )


@dataclass(frozen=True)
class Completion:
    """What was sampled after a prompt."""

    tokens: Tokens
    sampler_logprobs: LogProbs
    truncated: bool
    """whether it has reached its limit without an end token"""


class GroupSampler(Protocol):
    """Samples the completions of a group: a model in this process, or a server."""

    def sample_group(
        self, prompt: Sequence[int], group_size: int, settings: SamplingSettings, seed: int, group: int
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class ModelSampler:
    """Samples with a model in this process."""

    model: PolicyModel

    def sample_group(
        self, prompt: Sequence[int], group_size: int, settings: SamplingSettings, seed: int, group: int
    ) -> list[Completion]:
        return sample_group(self.model, prompt, group_size, settings, seed, group)


def rollout_seed(seed: int, group: int, index: int) -> int:
    """The seed of a rollout: 64 bits, signed."""
    digest = hashlib.sha256(f"{seed}/{group}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def draw_uniform(seed: int, group: int, group_size: int, tokens: int) -> Tensor:
    """(rollouts, tokens) numbers in [0, 1) in float64; each row comes from a generator of its own."""
    generators = (torch.Generator().manual_seed(rollout_seed(seed, group, index)) for index in range(group_size))
    return torch.stack([torch.rand(tokens, generator=generator, dtype=torch.float64) for generator in generators])


def sample_group(
    model: PolicyModel, prompt: Sequence[int], group_size: int, settings: SamplingSettings, seed: int, group: int
) -> list[Completion]:
    """The completions of a prompt. Rows that have ended stay in the batch, so that the shape of every pass, and with it
    the last bit of every row, does not depend on when other rows end.
    """
    if not len(prompt):
        raise ConfigError(f"the prompt of group {group} has no token", "expected prompts of at least one token")
    device = next(model.module.parameters()).device
    draws = draw_uniform(seed, group, group_size, settings.tokens).to(device)
    ends = torch.tensor(sorted(settings.end_tokens), dtype=torch.int64, device=device)
    ended = torch.zeros(group_size, dtype=torch.bool, device=device)
    chosen, logprobs, lengths = [], [], torch.full((group_size,), settings.tokens, device=device)
    with model.decoding(torch.tensor(prompt, device=device), group_size, settings.tokens) as (logits, following):
        for step in range(settings.tokens):
            tokens = choose_tokens(logits, settings, draws[:, step], group)
            chosen.append(tokens)
            logprobs.append(token_logprobs(logits[:, None], tokens[:, None], settings.temperature)[:, 0])
            ends_now = torch.isin(tokens, ends) & ~ended
            lengths = torch.where(ends_now, step + 1, lengths)
            ended = ended | ends_now
            if step == settings.tokens - 1 or bool(ended.all()):
                break
            logits = following(tokens)
    sampled = torch.stack(chosen, dim=1).cpu().numpy().astype(np.int32)
    of_tokens = torch.stack(logprobs, dim=1).double().cpu().numpy()
    return [
        Completion(sampled[row, :length], of_tokens[row, :length], not done)
        for row, (length, done) in enumerate(zip(lengths.tolist(), ended.tolist(), strict=True))
    ]


def choose_tokens(logits: Tensor, settings: SamplingSettings, draws: Tensor, group: int) -> Tensor:
    """(rows, vocabulary) -> (rows,), by the inverse of the cumulative distribution in float64."""
    if not bool(logits.isfinite().all()):
        raise NumericsError(
            f"group {group}: the logits of the policy are not finite",
            "try a smaller learning rate, or gradient clipping",
        )
    if settings.greedy:
        return logits.argmax(-1)
    probabilities = (logits.double() / settings.temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    found = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    # A draw may round up to the total: the last token that has a probability is then the right one.
    positions = torch.arange(logits.shape[-1], device=logits.device)
    last = torch.where(probabilities > 0, positions, 0).amax(-1)
    return torch.minimum(found, last)
