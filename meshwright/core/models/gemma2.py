"""The Gemma 2 family: norms before and after, soft-capped scores and logits, alternating sliding window, GeGLU.

It computes what transformers' Gemma2ForCausalLM computes (arXiv:2408.00118). Parallelism replaces the same submodules
as in the Llama family. No module casts below the precision of its input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.base.config import ModelConfig
from meshwright.base.models.gemma2.spec import Gemma2Options
from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.decoder import LanguageModel
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.models.layers.projections import project
from meshwright.core.models.layers.rotary import RotaryEmbedding, RotaryTables, apply_rotary


class Gemma2Norm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32 at least."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.width))
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (F.rms_norm(wide, self.weight.shape, eps=self.eps) * (1.0 + self.weight)).to(x.dtype)


class Gemma2Attention(nn.Module):
    """Projections around `CoreAttention` with a soft cap; every second block, from the first on, has the window."""

    def __init__(self, config: ModelConfig, options: Gemma2Options, layer: int) -> None:
        super().__init__()
        self.head_size = options.head_dim(config)
        kv_width = config.kv_heads * self.head_size
        self.q = nn.Linear(config.width, config.heads * self.head_size, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        scale = (options.query_scale or self.head_size) ** -0.5
        self.core = CoreAttention(None if layer % 2 else options.window, scale, options.attention_softcap)
        self.out = nn.Linear(config.heads * self.head_size, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 instead of the number of heads: a tensor-parallel rank has a subset of the heads
        q, k, v = (
            p.view(batch, sequence, -1, self.head_size).transpose(1, 2) for p in project(x, (self.q, self.k, self.v))
        )
        mixed = self.core(apply_rotary(q, rotary), apply_rotary(k, rotary), v, rotary.documents)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


class GeGLU(FeedForward):
    """down(gelu(gate(x)) * up(x)) with the tanh approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))  # type: ignore[no-any-return]


class Gemma2Block(nn.Module):
    """One transformer layer with norms before and after attention and feed-forward."""

    def __init__(self, config: ModelConfig, options: Gemma2Options, layer: int) -> None:
        super().__init__()
        self.attention_norm = Gemma2Norm(config)
        self.attention = Gemma2Attention(config, options, layer)
        self.attention_post_norm = Gemma2Norm(config)
        self.ffn_norm = Gemma2Norm(config)
        self.ffn = GeGLU(config.width, config.ffn)
        self.ffn_post_norm = Gemma2Norm(config)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotary))
        return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x)))  # type: ignore[no-any-return]


class Gemma2Decoder(nn.Module):
    """Token ids -> hidden states; the embedding is scaled by the square root of the width."""

    residual: torch.dtype | None = None
    """the dtype of the residual stream; None: that of the embedding"""

    def __init__(self, config: ModelConfig, options: Gemma2Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Gemma2Block(config, options, layer) for layer in range(config.layers))
        self.stack = BlockStack()
        self.norm = Gemma2Norm(config)
        self.rotary = RotaryEmbedding(options.head_dim(config), config.rope_theta)
        self.scale = config.width**0.5

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = (self.embedding(tokens) * self.scale).to(self.residual)
        rotary = self.rotary(tokens.shape[1], x.dtype, x.device, documents)
        return self.norm(self.stack(self.blocks, x, rotary))  # type: ignore[no-any-return]


def build(config: ModelConfig, options: Gemma2Options) -> LanguageModel:
    head = HeadLoss(config.width, config.vocab, options.logit_softcap)
    return LanguageModel(config, Gemma2Decoder(config, options), head)
