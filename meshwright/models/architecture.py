"""The sizes of a transformer: dense or MoE, with multi-head, grouped-query or latent attention; torch-free.

The planner's formulas read them. They cover more than the families here: published models that Meshwright plans only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434); fields as in Hugging Face's config."""

    q_lora_rank: int
    """width that queries are compressed to; 0 if they are not compressed"""
    kv_lora_rank: int
    """width that keys and values are compressed to, together"""
    qk_nope_head_dim: int
    """dimension of a head's queries and keys without rotary position"""
    qk_rope_head_dim: int
    """dimension with rotary position; all heads share these keys"""
    v_head_dim: int
    """dimension of a head's values"""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder."""

    name: str
    """name of the model"""
    layers: int
    """number of blocks"""
    width: int
    """hidden size"""
    heads: int
    """query heads"""
    kv_heads: int
    """key and value heads"""
    head_dim: int
    """dimension of one head"""
    ffn: int
    """intermediate size of a dense feed-forward"""
    vocab: int
    """vocabulary size"""
    gated: bool = True
    """whether a feed-forward has three matrices (SwiGLU) rather than two"""
    tied_embeddings: bool = False
    """whether the head shares the embedding's parameters"""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm"""
    bias: bool = False
    """whether all linear layers except the head have biases"""
    qkv_bias: bool = False
    """whether the query, key and value projections have biases, if not all linear layers do"""
    out_bias: bool = False
    """whether the output projection of attention has a bias"""
    ffn_bias: bool = False
    """whether a dense feed-forward has biases"""
    qk_norm: bool = False
    """whether queries and keys are normalized per head"""
    post_norms: bool = False
    """whether attention and feed-forward are normalized after the last matrix, too"""
    capped_scores: bool = False
    """whether scores have a soft cap, so that attention writes them to memory, chunk by chunk"""
    capped_logits: bool = False
    """whether logits have a soft cap, whose tanh is saved for backward"""
    parallel_residual: bool = False
    """whether attention and feed-forward read the same input, and are added together"""
    sliding_window: int = 0
    """tokens that attention looks back; 0 for all"""
    learned_positions: int = 0
    """number of learned position embeddings; 0 for rotary or no positions"""
    experts: int = 0
    """routed experts per MoE layer; 0 for a dense model"""
    experts_active: int = 0
    """routed experts per token"""
    experts_shared: int = 0
    """shared experts per MoE layer"""
    expert_ffn: int = 0
    """intermediate size of one expert"""
    shared_expert_gate: bool = False
    """whether a gate scales the output of the shared experts"""
    dense_layers: int = 0
    """leading layers of an MoE model that have a dense feed-forward"""
    latent_attention: LatentAttention | None = None
    """sizes of multi-head latent attention; None for other attention"""

    loss_in_head_unit: ClassVar[bool] = True
    """whether the loss runs inside the FSDP unit of the head"""
    axes: ClassVar[frozenset[str]] = frozenset(("shard", "tensor", "pipeline", "context", "expert"))
    """axes of parallelism, besides replication, that can serve the model"""

    @property
    def ffn_matrices(self) -> int:
        """Matrices of one feed-forward."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters in the matrices of one layer's attention."""
        if self.latent_attention is None:
            return self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mla = self.latent_attention
        query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        queries = (
            mla.q_lora_rank * (self.width + self.heads * query_dim)
            if mla.q_lora_rank
            else self.width * self.heads * query_dim
        )
        down = self.width * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        up = mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return queries + down + up + self.heads * mla.v_head_dim * self.width

    @property
    def ffn_parameters(self) -> int:
        """Parameters in the matrices of one dense feed-forward."""
        return self.ffn_matrices * self.width * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Parameters in the matrices of one expert."""
        return self.ffn_matrices * self.width * self.expert_ffn

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def all_expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    def active_matrix_parameters(self, layer: int) -> int:
        """Parameters in the matrices of a layer that one token uses."""
        if not self.is_moe_layer(layer):
            return self.attention_parameters + self.ffn_parameters
        active = (self.experts_active + self.experts_shared) * self.expert_parameters
        return self.attention_parameters + active + self.width * (self.experts + self.shared_expert_gate)

    def matrix_parameters(self, layer: int) -> int:
        """Parameters in all matrices of a layer."""
        inactive = (self.experts - self.experts_active) * self.expert_parameters if self.is_moe_layer(layer) else 0
        return self.active_matrix_parameters(layer) + inactive

    @property
    def vector_parameters(self) -> int:
        """Parameters in one layer's norms and biases."""
        norms = (4 if self.post_norms else 2) * self.width * (2 if self.norm == "layer" else 1) + (
            2 * self.head_dim if self.qk_norm else 0
        )
        if self.latent_attention is not None:
            norms += self.latent_attention.q_lora_rank + self.latent_attention.kv_lora_rank
        qkv = self.head_dim * (self.heads + 2 * self.kv_heads) if self.bias or self.qkv_bias else 0
        out = self.width if self.bias or self.out_bias else 0
        dense = (self.bias or self.ffn_bias) and not self.experts
        return norms + qkv + out + ((self.ffn_matrices - 1) * self.ffn + self.width if dense else 0)

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the blocks: embedding, head unless it is tied, learned positions and the final norm."""
        norm = self.width * (2 if self.norm == "layer" else 1)
        tables = self.vocab * self.width * (1 if self.tied_embeddings else 2)
        return tables + self.learned_positions * self.width + norm

    @cached_property
    def parameters(self) -> int:
        """All parameters of the model."""
        return self.outer_parameters + sum(
            self.matrix_parameters(layer) + self.vector_parameters for layer in range(self.layers)
        )

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.outer_parameters + sum(
            self.active_matrix_parameters(layer) + self.vector_parameters for layer in range(self.layers)
        )

    @property
    def attention_width(self) -> int:
        """Query-key dimension plus value dimension, summed over heads: attention costs 2 FLOP per unit and score."""
        if self.latent_attention is None:
            return 2 * self.heads * self.head_dim
        mla = self.latent_attention
        return self.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
