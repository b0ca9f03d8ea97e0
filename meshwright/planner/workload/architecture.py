"""A decoder as the planner sees it: dense or with experts, full, grouped or latent attention; torch-free.

It says more than a run file can: the families of published models, also those that our own decoder does not train.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.config import ModelConfig


@dataclass(frozen=True)
class LatentAttention:
    """Attention through compressed queries, keys and values (MLA)."""

    q_lora_rank: int
    """width that queries are compressed to; 0: they are not"""
    kv_lora_rank: int
    """width that keys and values are compressed to, together"""
    qk_nope_head_dim: int
    """size of a head's keys and queries without a position"""
    qk_rope_head_dim: int
    """size of the part with a position, one for all heads of the keys"""
    v_head_dim: int
    """size of a head's values"""


@dataclass(frozen=True)
class Architecture:
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    """size of a head"""
    ffn: int
    """inner width of a dense feed-forward"""
    vocab: int
    gated: bool = True
    """three matrices in a feed-forward (SwiGLU); else two"""
    tied_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    """whether all linear layers but the head have biases"""
    qkv_bias: bool = False
    """whether queries, keys and values have, where not all have"""
    out_bias: bool = False
    """whether the output of attention has"""
    ffn_bias: bool = False
    """whether a dense feed-forward has"""
    qk_norm: bool = False
    """a norm of the size of a head on queries, and one on keys"""
    parallel_residual: bool = False
    """attention and feed-forward read the same input, and are added together"""
    sliding_window: int = 0
    """tokens that attention looks back; 0: all"""
    learned_positions: int = 0
    """rows of learned positions; 0: rotary ones or none"""
    experts: int = 0
    experts_active: int = 0
    experts_shared: int = 0
    expert_ffn: int = 0
    """inner width of one expert"""
    shared_expert_gate: bool = False
    """the shared experts' output is scaled by a gate of their own"""
    dense_layers: int = 0
    """layers at the beginning that have a dense feed-forward where the others have experts"""
    latent_attention: LatentAttention | None = None

    @classmethod
    def from_config(cls, model: ModelConfig, name: str = "") -> Architecture:
        """Of a run's model."""
        return cls(
            name,
            model.layers,
            model.width,
            model.heads,
            model.kv_heads,
            model.width // model.heads,
            model.ffn,
            model.vocab,
            tied_embeddings=model.tie,
            experts=model.experts,
            experts_active=model.experts_active if model.experts else 0,
            experts_shared=model.experts_shared,
            expert_ffn=model.ffn if model.experts else 0,
        )

    @property
    def ffn_matrices(self) -> int:
        """of a feed-forward"""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Numbers in one layer's matrices of attention."""
        if self.latent_attention is None:
            return self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mla = self.latent_attention
        query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        asked = (
            mla.q_lora_rank * (self.width + self.heads * query) if mla.q_lora_rank else self.width * self.heads * query
        )
        told = self.width * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank * self.heads * (
            mla.qk_nope_head_dim + mla.v_head_dim
        )
        return asked + told + self.heads * mla.v_head_dim * self.width

    @property
    def ffn_parameters(self) -> int:
        return self.ffn_matrices * self.width * self.ffn

    @property
    def expert_parameters(self) -> int:
        """of one expert"""
        return self.ffn_matrices * self.width * self.expert_ffn

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def moe_layers(self) -> int:
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    def active_matrix_parameters(self, layer: int) -> int:
        """Numbers in the matrices that one token of a layer meets."""
        if not self.is_moe_layer(layer):
            return self.attention_parameters + self.ffn_parameters
        met = (self.experts_active + self.experts_shared) * self.expert_parameters
        return self.attention_parameters + met + self.width * (self.experts + self.shared_expert_gate)

    def matrix_parameters(self, layer: int) -> int:
        """Numbers in all of a layer's matrices."""
        idle = (self.experts - self.experts_active) * self.expert_parameters if self.is_moe_layer(layer) else 0
        return self.active_matrix_parameters(layer) + idle

    @property
    def vector_parameters(self) -> int:
        """Numbers in one layer's norms and biases."""
        norms = 2 * self.width * (2 if self.norm == "layer" else 1) + (2 * self.head_dim if self.qk_norm else 0)
        if self.latent_attention is not None:
            norms += self.latent_attention.q_lora_rank + self.latent_attention.kv_lora_rank
        asked = self.head_dim * (self.heads + 2 * self.kv_heads) if self.bias or self.qkv_bias else 0
        out = self.width if self.bias or self.out_bias else 0
        dense = (self.bias or self.ffn_bias) and not self.experts
        return norms + asked + out + ((self.ffn_matrices - 1) * self.ffn + self.width if dense else 0)

    @property
    def outer_parameters(self) -> int:
        """Numbers in the embedding, the head unless it is tied, positions and the last norm."""
        last = self.width * (2 if self.norm == "layer" else 1)
        return self.vocab * self.width * (1 if self.tied_embeddings else 2) + self.learned_positions * self.width + last

    @cached_property
    def parameters(self) -> int:
        return self.outer_parameters + sum(
            self.matrix_parameters(layer) + self.vector_parameters for layer in range(self.layers)
        )

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        return self.outer_parameters + sum(
            self.active_matrix_parameters(layer) + self.vector_parameters for layer in range(self.layers)
        )

    @property
    def attention_width(self) -> int:
        """Numbers of all heads that a query and a key are multiplied in, and of the values: the sum of both."""
        if self.latent_attention is None:
            return 2 * self.heads * self.head_dim
        return self.heads * (
            self.latent_attention.qk_nope_head_dim
            + self.latent_attention.qk_rope_head_dim
            + self.latent_attention.v_head_dim
        )
