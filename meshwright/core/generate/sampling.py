"""Chooses the next token of every row from its logits: greedy, or at random with temperature, top-k and top-p."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.core.generate.settings import SamplingConfig


class TokenSampler:
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
