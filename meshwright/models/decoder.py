"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Free of any parallelism.

Everything that a way of parallelism may want to replace is a submodule of its own: `places` (the positions of tokens),
`attend` (the attention itself, after projection and rotation), `ffn` (dense or experts), `stack` (the way through the
blocks) and the head (see loss.py). Nothing here casts below the precision of its input, so the whole model runs in
float64 when its parameters are.
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
    """Where the tokens of a pass stand in their sequences."""

    cos: Tensor
    sin: Tensor
    """of each position and pair, (sequence, head size / 2)"""
    documents: Tensor | None
    """the document of each token of the whole sequence, (batch, sequence); None: one document"""


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
    """Causal scaled-dot-product attention over (batch, heads, sequence, head size); keys and values may have fewer
    heads. No token attends to another document's.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        kv_width = config.kv_heads * self.head_size
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.core = CoreAttention()
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, where: RotaryTables) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 and not the head count: a tensor-parallel rank holds a part of the heads
        q, k, v = (p(x).view(batch, sequence, -1, self.head_size).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = self.core(apply_rotary(q, where), apply_rotary(k, where), v, where.documents)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = Experts(config) if config.experts else FeedForward(config.width, config.ffn)

    def forward(self, x: Tensor, where: RotaryTables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), where)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class BlockStack(nn.Module):
    """One block after the other."""

    def forward(self, blocks: Iterable[nn.Module], x: Tensor, where: RotaryTables) -> Tensor:
        for block in blocks:
            x = block(x, where)
        return x


class RotaryEmbedding(nn.Module):
    """The positions of a pass's tokens in their sequences, and with them where they stand."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.theta = config.rope_theta

    def forward(self, tokens: int, dtype: torch.dtype, device: torch.device, documents: Tensor | None) -> RotaryTables:
        """Made anew each pass: no buffer to shard or lose."""
        positions = self.positions(tokens, device)
        return RotaryTables(*rotary_tables(positions, self.head_size, self.theta, dtype), documents)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(tokens, device=device)


class Decoder(nn.Module):
    """Token ids to hidden states; the head is the loss module's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.stack = BlockStack()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        where = self.rotary(tokens.shape[1], x.dtype, x.device, documents)
        return self.norm(self.stack(self.blocks, x, where))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """The decoder with its head and loss: (tokens, labels) -> (sum of token losses, count of valid tokens).

    Whoever gives a part of each sequence alone gives the documents of the whole.
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
        """One matrix for embedding and head."""
        weight = self.decoder.embedding.weight
        assert isinstance(weight, nn.Parameter)
        self.head.weight = weight


def document_ids(tokens: Tensor, separator: int | None) -> Tensor | None:
    """The number of each token's document in its sequence; a separator belongs to the one that it ends."""
    if separator is None:
        return None
    ends = (tokens == separator).long()
    return ends.cumsum(dim=1) - ends


def rotary_tables(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for each position and pair, (sequence, head size / 2)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=wide) / head_size
    angles = positions.to(wide)[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, where: RotaryTables) -> Tensor:
    """Rotates the pairs (i, i + half) of each head, as the Llama checkpoints lay them out."""
    cos, sin = where.cos, where.sin
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
