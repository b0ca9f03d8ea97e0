"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Free of any parallelism.

Everything that a way of parallelism may want to replace is a submodule of its own: `attend` (the attention
itself, after projection and rotation), `ffn` (dense or experts), `stack` (the way through the blocks) and the head
(see loss.py). Nothing here casts below the precision of its input, so the whole model runs in float64 when its
parameters are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import ModelConfig
from meshwright.model.experts import Experts
from meshwright.model.loss import HeadLoss


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class Attend(nn.Module):
    """Causal scaled-dot-product attention over (batch, heads, sequence, head size); keys and values may have fewer
    heads.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        kv_width = config.kv_heads * self.head_size
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.attend = Attend()
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 and not the head count: a tensor-parallel rank holds a part of the heads
        q, k, v = (p(x).view(batch, sequence, -1, self.head_size).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = self.attend(rotate(q, rotary), rotate(k, rotary), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn: nn.Module
        if config.experts:
            experts = [FeedForward(config.width, config.ffn) for _ in range(config.experts)]
            self.ffn = Experts(config.width, experts, config.experts_active)
        else:
            self.ffn = FeedForward(config.width, config.ffn)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """One block after the other."""

    def forward(self, blocks: Iterable[nn.Module], x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        for block in blocks:
            x = block(x, rotary)
        return x


class Decoder(nn.Module):
    """Token ids to hidden states; the head is the loss module's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.stack = Stack()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head_size = config.width // config.heads
        self.rope_theta = config.rope_theta

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotary = rotary_tables(positions, self.head_size, self.rope_theta, x.dtype)
        return self.norm(self.stack(self.blocks, x, rotary))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """The decoder with its head and loss: (tokens, labels) -> (sum of token losses, count of valid tokens)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.decoder = Decoder(config)
        self.head = HeadLoss(config.width, config.vocab)
        if config.tie:
            self.tie()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.decoder(tokens), labels)  # type: ignore[no-any-return]

    def tie(self) -> None:
        """One matrix for embedding and head."""
        weight = self.decoder.embedding.weight
        assert isinstance(weight, nn.Parameter)
        self.head.weight = weight


def rotary_tables(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for each position and pair, (sequence, head size / 2). Made anew each forward: no buffer to shard
    or lose.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=wide) / head_size
    angles = positions.to(wide)[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + half) of each head, as the Llama checkpoints lay them out."""
    cos, sin = rotary
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
