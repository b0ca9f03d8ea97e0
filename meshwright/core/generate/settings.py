"""What a generation takes and returns. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import ConfigError

MAX_TOKENS = 1 << 20
"""Limit of generated tokens per prompt: the cache has a slot for each."""


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
            ("tokens", self.tokens, 1 <= self.tokens <= MAX_TOKENS, f"1 to {MAX_TOKENS:,}"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise ConfigError(f"--{name} {value} is out of range", f"expected {expected}")


@dataclass(frozen=True)
class Sample:
    """What was generated after a prompt."""

    prompt: str
    text: str
    """generated text, without the prompt"""
    tokens: list[int]
    """generated tokens"""
    ended: bool
    """whether the text ended with the end-of-document token, which it does not contain"""
    checkpoint: str
    """name of the checkpoint"""
