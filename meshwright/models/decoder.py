"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Free of any parallelism.

Parallelism replaces submodules: `rotary` (positions), `core` (attention after projection and rotation), `ffn` (dense or
experts), `stack` (the loop over blocks) and the head (see loss.py). No module casts below the precision of its input,
so the model runs in float64 if its parameters are float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import ModelConfig
from meshwright.models.experts import Experts
from meshwright.models.feed_forward import FeedForward
from meshwright.models.loss import HeadLoss


class RotaryTables(NamedTuple):
    """The rotary embedding of the positions of a forward pass, and the documents of its tokens."""

    cos: Tensor
    sin: Tensor
    """cosine and sine of every position and pair of dimensions, (sequence, head size / 2)"""
    documents: Tensor | None
    """the document index of every token of the full sequence, (batch, sequence); None: one document per sequence"""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention over (batch, heads, sequence, head size). Keys and values may have
    fewer heads than queries. Attention does not cross documents.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        grouped_query = q.shape[1] != k.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped_query)
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped_query)


class Attention(nn.Module):
    """Projections around `CoreAttention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        kv_width = config.kv_heads * self.head_size
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.core = CoreAttention()
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 instead of the number of heads: a tensor-parallel rank has a subset of the heads
        q, k, v = (p(x).view(batch, sequence, -1, self.head_size).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = self.core(apply_rotary(q, rotary), apply_rotary(k, rotary), v, rotary.documents)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer with pre-normalization."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = Experts(config) if config.experts else FeedForward(config.width, config.ffn)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class BlockStack(nn.Module):
    """Runs the blocks in sequence."""

    def forward(self, blocks: Iterable[nn.Module], x: Tensor, rotary: RotaryTables) -> Tensor:
        for block in blocks:
            x = block(x, rotary)
        return x


class RotaryEmbedding(nn.Module):
    """Computes the rotary tables of a forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.theta = config.rope_theta

    def forward(self, tokens: int, dtype: torch.dtype, device: torch.device, documents: Tensor | None) -> RotaryTables:
        """The tables are computed in every forward pass, so there is no buffer to shard or to save."""
        positions = self.positions(tokens, device)
        return RotaryTables(*rotary_tables(positions, self.head_size, self.theta, dtype), documents)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(tokens, device=device)


class Decoder(nn.Module):
    """Token ids -> hidden states. The output projection is part of the loss module."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.stack = BlockStack()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        rotary = self.rotary(tokens.shape[1], x.dtype, x.device, documents)
        return self.norm(self.stack(self.blocks, x, rotary))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """The decoder with its head and loss: (tokens, labels) -> (sum of token losses, number of valid tokens).

    `documents` are those of full sequences; a caller that passes sequence chunks must pass them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.decoder = Decoder(config)
        self.head = HeadLoss(config.width, config.vocab)
        self.separator = config.separator
        if config.tie:
            self.tie()

    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if documents is None:
            documents = document_ids(tokens, self.separator)
        return self.head(self.decoder(tokens, documents), labels)  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Ties the weight of the head to the embedding."""
        weight = self.decoder.embedding.weight
        assert isinstance(weight, nn.Parameter)
        self.head.weight = weight


def document_ids(tokens: Tensor, separator: int | None) -> Tensor | None:
    """The index of each token's document in its sequence; a separator belongs to the document that it ends."""
    if separator is None:
        return None
    is_separator = (tokens == separator).long()
    return is_separator.cumsum(dim=1) - is_separator


def rotary_tables(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair of dimensions, (sequence, head size / 2)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=wide) / head_size
    angles = positions.to(wide)[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotates the dimension pairs (i, i + half) of each head, the layout of Llama checkpoints."""
    cos, sin = rotary.cos, rotary.sin
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
