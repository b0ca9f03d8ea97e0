"""The GPT-2 family: learned positions, LayerNorm, multi-head attention and GELU, with biases everywhere.

It computes what transformers' GPT2LMHeadModel computes without dropout. Parallelism replaces the same submodules as in
the Llama family. No module casts below the precision of its input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.base.config import ModelConfig
from meshwright.base.models.gpt2.spec import GPT2Options
from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.decoder import LanguageModel
from meshwright.core.models.layers.norm import LayerNorm
from meshwright.core.models.layers.projections import project
from meshwright.core.models.layers.rotary import RotaryEmbedding, RotaryTables


class GPT2Attention(nn.Module):
    """Projections around `CoreAttention`; nothing is rotated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.core = CoreAttention()
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 instead of the number of heads: a tensor-parallel rank has a subset of the heads
        q, k, v = (
            p.view(batch, sequence, -1, self.head_size).transpose(1, 2) for p in project(x, (self.q, self.k, self.v))
        )
        mixed = self.core(q, k, v, rotary.documents)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


class GELUFeedForward(nn.Module):
    """down(gelu(up(x))) with the tanh approximation of GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class GPT2Block(nn.Module):
    """One transformer layer with pre-normalization."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width, config.norm_eps)
        self.attention = GPT2Attention(config)
        self.ffn_norm = LayerNorm(config.width, config.norm_eps)
        self.ffn = GELUFeedForward(config.width, config.ffn)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class GPT2Decoder(nn.Module):
    """Token ids -> hidden states. `rotary` rotates no dimension: it says which positions the tokens have."""

    residual: torch.dtype | None = None
    """the dtype of the residual stream; None: that of the embedding"""

    def __init__(self, config: ModelConfig, options: GPT2Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(options.positions, config.width)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.stack = BlockStack()
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.rotary = RotaryEmbedding(0, config.rope_theta)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        positions = self.rotary.positions(tokens.shape[1], tokens.device)
        x = (self.embedding(tokens) + self.position(positions)).to(self.residual)
        rotary = self.rotary(tokens.shape[1], x.dtype, x.device, documents)
        return self.norm(self.stack(self.blocks, x, rotary))  # type: ignore[no-any-return]


def build(config: ModelConfig, options: GPT2Options) -> LanguageModel:
    return LanguageModel(config, GPT2Decoder(config, options))
