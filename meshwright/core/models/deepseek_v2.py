"""The DeepSeek-V2 family: multi-head latent attention, and experts beside shared ones after the first, dense blocks.

It computes what transformers' DeepseekV2ForCausalLM computes (arXiv:2405.04434). Parallelism replaces the same
submodules as in the Llama family. No module casts below the precision of its input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.base.config import ModelConfig
from meshwright.base.models.deepseek_v2.options import DeepSeekV2Options
from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.decoder import LanguageModel
from meshwright.core.models.layers.experts import Experts
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.norm import RMSNorm
from meshwright.core.models.layers.rotary import RotaryEmbedding, RotaryTables

LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values, whatever that of the other norms is."""


class MultiHeadLatentAttention(nn.Module):
    """Queries and keys are a part without position beside a rotated part; all heads share the rotated part of keys.
    Keys and values come from one compressed vector per token, and queries too if `q_lora_rank` is not 0.
    """

    def __init__(self, config: ModelConfig, options: DeepSeekV2Options) -> None:
        super().__init__()
        sizes = self.sizes = options.latent_attention(config)
        self.head_size = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        self.score_scale = options.score_scale
        if sizes.q_lora_rank:
            self.q_down = nn.Linear(config.width, sizes.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(sizes.q_lora_rank, LATENT_EPS)
            self.q_up = nn.Linear(sizes.q_lora_rank, config.heads * self.head_size, bias=False)
        else:
            self.q = nn.Linear(config.width, config.heads * self.head_size, bias=False)
        self.kv_down = nn.Linear(config.width, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(sizes.kv_lora_rank, LATENT_EPS)
        up_size = sizes.qk_nope_head_dim + sizes.v_head_dim
        self.kv_up = nn.Linear(sizes.kv_lora_rank, config.heads * up_size, bias=False)
        self.core = CoreAttention()
        self.out = nn.Linear(config.heads * sizes.v_head_dim, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        batch, sequence, _ = x.shape
        sizes = self.sizes
        q = self.q_up(self.q_norm(self.q_down(x))) if sizes.q_lora_rank else self.q(x)
        # -1 instead of the number of heads: a tensor-parallel rank has a subset of the heads
        q = q.view(batch, sequence, -1, self.head_size).transpose(1, 2)
        q_plain, q_rotated = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
        q = torch.cat((q_plain, rotate_neighbours(q_rotated, rotary)), dim=-1)
        latent, k_rotated = self.kv_down(x).split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, sequence, q.shape[1], -1).transpose(1, 2)
        k_plain, v = kv.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        k_rotated = rotate_neighbours(k_rotated[:, None], rotary).expand(-1, q.shape[1], -1, -1)
        k = torch.cat((k_plain, k_rotated), dim=-1)
        # Attention kernels and context parallelism need queries, keys and values of one size.
        padded = F.pad(v, (0, self.head_size - sizes.v_head_dim))
        mixed = self.core(q if self.score_scale == 1.0 else q * self.score_scale, k, padded, rotary.documents)
        mixed = mixed[..., : sizes.v_head_dim]
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]


def rotate_neighbours(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotates the dimension pairs (2 i, 2 i + 1) of each head, the layout of DeepSeek checkpoints."""
    cos, sin = rotary.cos, rotary.sin
    first, second = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


class DeepSeekV2Block(nn.Module):
    """One transformer layer with pre-normalization: `dense_ffn` in the first blocks, and `ffn` with experts after."""

    def __init__(self, config: ModelConfig, options: DeepSeekV2Options, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = MultiHeadLatentAttention(config, options)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.is_dense = layer < options.dense_layers
        if self.is_dense:
            self.dense_ffn = FeedForward(config.width, options.dense_inner(config))
        else:
            self.ffn = Experts(config, options.routing)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        ffn = self.dense_ffn if self.is_dense else self.ffn
        return x + ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class DeepSeekV2Decoder(nn.Module):
    """Token ids -> hidden states."""

    residual: torch.dtype | None = None
    """the dtype of the residual stream; None: that of the embedding"""

    def __init__(self, config: ModelConfig, options: DeepSeekV2Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(DeepSeekV2Block(config, options, layer) for layer in range(config.layers))
        self.stack = BlockStack()
        self.norm = RMSNorm(config.width, config.norm_eps)
        rotary_size = options.latent_attention(config).qk_rope_head_dim
        self.rotary = RotaryEmbedding(rotary_size, config.rope_theta, options.scaling)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens).to(self.residual)
        rotary = self.rotary(tokens.shape[1], x.dtype, x.device, documents)
        return self.norm(self.stack(self.blocks, x, rotary))  # type: ignore[no-any-return]


def build(config: ModelConfig, options: DeepSeekV2Options) -> LanguageModel:
    return LanguageModel(config, DeepSeekV2Decoder(config, options))
