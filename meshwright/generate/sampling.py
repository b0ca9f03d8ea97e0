"""Chooses the next token of every row from its logits: greedy, or at random with temperature, top-k and top-p."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import ConfigError


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen."""

    tokens: int = 100
    """the largest number of tokens to generate per prompt"""
    temperature: float = 1.0
    """divides the logits; 0 chooses the most likely token"""
    top_k: int = 0
    """the number of most likely tokens to choose from; 0: all"""
    top_p: float = 1.0
    """chooses from the most likely tokens whose probabilities sum to this"""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("tokens", self.tokens, self.tokens >= 1, "1 or more"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise ConfigError(f"--{name} {value} is out of range", f"expected {expected}")


class Sampler:
    """Draws the tokens of a batch. A row's random numbers depend on the seed, its prompt, and how many equal prompts
    precede it, so that a prompt gets the same tokens in every batch.
    """

    def __init__(self, config: SamplingConfig, prompts: Sequence[Sequence[int]]) -> None:
        self.config = config
        seen: Counter[tuple[int, ...]] = Counter()
        self.generators = []
        for prompt in map(tuple, prompts):
            digest = hashlib.sha256(f"{config.seed}/{seen[prompt]}/{list(prompt)}".encode()).digest()
            self.generators.append(torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True)))
            seen[prompt] += 1

    def choose(self, logits: Tensor) -> Tensor:
        """(batch, vocabulary) -> (batch,). Random choices use the inverse of the cumulative distribution."""
        if not self.config.temperature:
            return logits.argmax(-1)
        scaled = logits.double() / self.config.temperature
        ordered, tokens = scaled.topk(min(self.config.top_k or scaled.shape[-1], scaled.shape[-1]))
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        kept = torch.where(before < self.config.top_p, probabilities, 0.0)
        cumulative = kept.cumsum(-1)
        draws = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in self.generators])
        goal = (draws.to(logits.device) * cumulative[:, -1])[:, None]
        chosen = torch.searchsorted(cumulative, goal, right=True).clamp(max=kept.shape[-1] - 1)
        # A draw may round up to the total; the last token that was kept is then the right one.
        last_kept = (kept > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, torch.minimum(chosen, last_kept))[:, 0]
