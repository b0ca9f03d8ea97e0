"""A decoder with RMSNorm, rotary positions, grouped-query attention, and SwiGLU or experts, as Llama's.

Parallelism replaces submodules: `rotary` (positions), `core` (attention after projection and rotation), `ffn` (dense or
experts), `stack` (the loop over blocks) and the head (see models/layers/loss.py). No module casts below the precision
of its input, so the model runs in float64 if its parameters are float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.config import ModelConfig
from meshwright.base.models.decoder_spec import DecoderVariant
from meshwright.core.models.layers.attention import CoreAttention, document_ids
from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.experts import Experts
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.models.layers.norm import RMSNorm
from meshwright.core.models.layers.projections import project
from meshwright.core.models.layers.rotary import RotaryEmbedding, RotaryTables, apply_rotary


class Attention(nn.Module):
    """Projections around `CoreAttention`."""

    def __init__(self, config: ModelConfig, variant: DecoderVariant) -> None:
        super().__init__()
        self.head_size = variant.head_size
        q_width, kv_width = config.heads * self.head_size, config.kv_heads * self.head_size
        self.q = nn.Linear(config.width, q_width, bias=variant.qkv_bias)
        self.k = nn.Linear(config.width, kv_width, bias=variant.qkv_bias)
        self.v = nn.Linear(config.width, kv_width, bias=variant.qkv_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if variant.qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.norm_eps)
            self.k_norm = RMSNorm(self.head_size, config.norm_eps)
        self.core = CoreAttention(variant.window)
        self.out = nn.Linear(q_width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        batch, sequence, _ = x.shape
        # -1 instead of the number of heads: a tensor-parallel rank has a subset of the heads
        q, k, v = (p.view(batch, sequence, -1, self.head_size) for p in project(x, (self.q, self.k, self.v)))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        mixed = self.core(apply_rotary(q, rotary), apply_rotary(k, rotary), v.transpose(1, 2), rotary.documents)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer with pre-normalization."""

    def __init__(self, config: ModelConfig, variant: DecoderVariant) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, variant)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = Experts(config, variant.routing) if config.experts else FeedForward(config.width, config.ffn)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token ids -> hidden states. The output projection is part of the loss module."""

    residual: torch.dtype | None = None
    """the dtype of the residual stream; None: that of the embedding"""

    def __init__(self, config: ModelConfig, variant: DecoderVariant) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, variant) for _ in range(config.layers))
        self.stack = BlockStack()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary = RotaryEmbedding(variant.head_size, config.rope_theta, variant.rope_scaling)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens).to(self.residual)
        rotary = self.rotary(tokens.shape[1], x.dtype, x.device, documents)
        return self.norm(self.stack(self.blocks, x, rotary))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """The decoder with its head and loss: (tokens, labels) -> (sum of token losses, number of valid tokens).

    Further tensors are told apart by their dtype. One of integers has the documents of full sequences; a caller that
    passes sequence chunks must pass it. One of floats has the values per token that the loss of the head takes beside
    the labels, as the policy objective does.
    """

    measures: Any = None
    """what the loss of the head measures in a step, see trainer/records/measures.py"""

    def __init__(self, config: ModelConfig, decoder: nn.Module, head: HeadLoss | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head or HeadLoss(config.width, config.vocab)
        self.separator = config.separator
        if config.tie:
            self.tie()

    def forward(self, tokens: Tensor, labels: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        documents = next((tensor for tensor in more if not tensor.is_floating_point()), None)
        if documents is None:
            documents = document_ids(tokens, self.separator)
        values = [tensor for tensor in more if tensor.is_floating_point()]
        return self.head(self.decoder(tokens, documents), labels, *values)  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Ties the weight of the head to the embedding."""
        self.head.weight = self.decoder.get_parameter("embedding.weight")
