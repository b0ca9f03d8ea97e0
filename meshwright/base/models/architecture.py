"""The sizes of a decoder: dense or MoE, of attention, state-space and linear-attention layers; torch-free.

The planner's formulas read them. They cover more than the families here: published models that Meshwright plans only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal

from meshwright.base.models.block_kinds import BlockKind, LinearAttention, Mixer, StateSpace, attended_tokens


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

    def up_projections(self, heads: int) -> int:
        """Parameters in the matrices that project compressed queries, keys and values up to the heads."""
        query_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return heads * (self.q_lora_rank * query_dim + self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim))


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
    """tokens that attention looks back in layers with a window: those of `layer_kinds`, or all; 0: none has one"""
    learned_positions: int = 0
    """number of learned position embeddings; 0 for rotary or no positions"""
    experts: int = 0
    """routed experts per MoE layer; 0 for a dense model"""
    experts_active: int = 0
    """routed experts per token"""
    expert_ffn: int = 0
    """intermediate size of one routed expert"""
    shared_ffn: int = 0
    """intermediate size of the shared experts of an MoE layer together; 0 if it has none"""
    shared_expert_gate: bool = False
    """whether a gate scales the output of the shared experts"""
    dense_layers: int = 0
    """leading layers of an MoE model that have a dense feed-forward"""
    latent_attention: LatentAttention | None = None
    """sizes of multi-head latent attention; None for other attention"""
    layer_kinds: tuple[BlockKind, ...] = ()
    """the kind of every layer of a hybrid model; empty if all layers have the same attention and a feed-forward"""
    state_space: StateSpace | None = None
    """sizes of the state-space layers among `layer_kinds`"""
    linear_attention: LinearAttention | None = None
    """sizes of the linear-attention layers among `layer_kinds`"""
    attention_gate: bool = False
    """whether a gate as wide as the queries scales the output of attention"""
    attention_sinks: bool = False
    """whether every query head has a learned sink"""
    expert_bias: bool = False
    """whether routed experts and the router have biases"""
    routing_groups: int = 0
    """groups that the experts are divided into for the choice of a token's experts; 0 for one"""
    routing_groups_active: int = 0
    """groups that the experts of a token are chosen from"""

    loss_in_head_unit: ClassVar[bool] = True
    """whether the loss runs inside the FSDP unit of the head"""
    axes: ClassVar[frozenset[str]] = frozenset(("shard", "tensor", "pipeline", "context", "expert"))
    """axes of parallelism, besides replication, that can serve the model"""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Computed once: the planner's caches look it up often."""
        return self._hash

    @property
    def ffn_matrices(self) -> int:
        """Matrices of one feed-forward."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters in the matrices of one layer's attention."""
        if self.latent_attention is None:
            query_heads = (3 if self.attention_gate else 2) * self.heads
            return self.width * self.head_dim * (query_heads + 2 * self.kv_heads)
        mla = self.latent_attention
        query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        down = self.width * (mla.q_lora_rank or self.heads * query_dim)
        down += self.width * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        return down + mla.up_projections(self.heads) + self.heads * mla.v_head_dim * self.width

    @property
    def ffn_parameters(self) -> int:
        """Parameters in the matrices of one dense feed-forward."""
        return self.ffn_matrices * self.width * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Parameters in the matrices of one routed expert, and its biases."""
        bias = (self.ffn_matrices - 1) * self.expert_ffn + self.width if self.expert_bias else 0
        return self.ffn_matrices * self.width * self.expert_ffn + bias

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters in the matrices of the shared experts of one layer."""
        return self.ffn_matrices * self.width * self.shared_ffn

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.block_kind(layer).ffn == "moe"

    def block_kind(self, layer: int) -> BlockKind:
        """The kind of a layer."""
        if self.layer_kinds:
            return self.layer_kinds[layer]
        return BlockKind(self.uniform_mixer, "moe" if self.experts and layer >= self.dense_layers else "dense")

    @property
    def uniform_mixer(self) -> Mixer:
        """The mixer of all layers of a model that is not a hybrid."""
        return "window" if self.sliding_window else "attention"

    @cached_property
    def kind_counts(self) -> dict[BlockKind, int]:
        """The kinds of the layers, each with its number of layers."""
        return dict(Counter(self.block_kind(layer) for layer in range(self.layers)))

    def kinds(self, moe: bool) -> tuple[tuple[BlockKind, float], ...]:
        """The kinds of the layers with experts, or of those without, each with its share of them. Hybrid models repeat
        a short pattern, so that every pipeline stage has about the same shares.
        """
        if not self.layer_kinds:
            return ((BlockKind(self.uniform_mixer, "moe" if moe else "dense"), 1.0),)
        return self._shares[moe]

    @cached_property
    def _shares(self) -> dict[bool, tuple[tuple[BlockKind, float], ...]]:
        shares = {}
        for moe in (False, True):
            own = {kind: count for kind, count in self.kind_counts.items() if (kind.ffn == "moe") == moe}
            total = sum(own.values())
            shares[moe] = tuple((kind, count / total) for kind, count in own.items())
        return shares

    @property
    def attention_share(self) -> float:
        """The share of the layers that have attention, whose keys and values context-parallel ranks exchange."""
        return sum(count for kind, count in self.kind_counts.items() if kind.has_attention) / self.layers

    def mean(self, moe: bool, value: Callable[[BlockKind], float]) -> float:
        """The mean of a value over the layers with experts, or over those without."""
        return sum(share * value(kind) for kind, share in self.kinds(moe))

    def mixer_parameters(self, kind: BlockKind) -> int:
        """Parameters in the matrices of a layer's mixer."""
        if kind.has_attention:
            return self.attention_parameters
        sizes = self.linear_attention if kind.mixer == "linear" else self.state_space
        return sizes.matrix_parameters(self.width) if kind.has_scan and sizes is not None else 0

    def mixer_flops(self, kind: BlockKind, sequence: int) -> float:
        """FLOPs per token of a layer's mixer in forward, without its matrices."""
        if kind.has_attention:
            window = self.sliding_window if kind.mixer == "window" else 0
            return 2.0 * attended_tokens(sequence, window) * self.attention_width
        sizes = self.linear_attention if kind.mixer == "linear" else self.state_space
        return sizes.scan_flops() if kind.has_scan and sizes is not None else 0.0

    def cache_elements(self, sequence: int) -> float:
        """Elements of keys, values and states of one sequence in generation, over all layers."""
        total = 0.0
        for layer in range(self.layers):
            kind = self.block_kind(layer)
            if kind.has_attention:
                tokens = min(sequence, self.sliding_window) if kind.mixer == "window" else sequence
                mla = self.latent_attention
                total += tokens * (
                    mla.kv_lora_rank + mla.qk_rope_head_dim if mla else 2 * self.kv_heads * self.head_dim
                )
            sizes = self.linear_attention if kind.mixer == "linear" else self.state_space
            total += sizes.cache_elements if kind.has_scan and sizes is not None else 0
        return total

    @property
    def all_expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        if self.layer_kinds:
            return sum(kind.ffn == "moe" for kind in self.layer_kinds)
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    def active_matrix_parameters(self, layer: int) -> int:
        """Parameters in the matrices of a layer that one token uses."""
        return self.active_kind_parameters(self.block_kind(layer))

    def active_kind_parameters(self, kind: BlockKind) -> int:
        """Parameters in the matrices of a layer of a kind that one token uses."""
        mixer = self.mixer_parameters(kind)
        if kind.ffn != "moe":
            return mixer + (self.ffn_parameters if kind.ffn == "dense" else 0)
        active = self.experts_active * self.expert_parameters + self.shared_expert_parameters
        return mixer + active + self.width * (self.experts + self.shared_expert_gate)

    def matrix_parameters(self, layer: int) -> int:
        """Parameters in all matrices of a layer."""
        inactive = (self.experts - self.experts_active) * self.expert_parameters if self.is_moe_layer(layer) else 0
        return self.active_matrix_parameters(layer) + inactive

    @property
    def vector_parameters(self) -> int:
        """Parameters in the norms and biases of one layer with attention and a feed-forward."""
        return self.kind_vector_parameters(BlockKind(ffn="moe" if self.experts else "dense"))

    def kind_vector_parameters(self, kind: BlockKind) -> int:
        """Parameters in the norms and biases of one layer, and in the convolution and the scan of its mixer."""
        norms = kind.sublayers * (2 if self.post_norms else 1) * self.width * (2 if self.norm == "layer" else 1)
        dense = (self.bias or self.ffn_bias) and kind.ffn == "dense"
        ffn = (self.ffn_matrices - 1) * self.ffn + self.width if dense else 0
        ffn += self.experts if kind.ffn == "moe" and self.expert_bias else 0
        if kind.has_scan:
            sizes = self.linear_attention if kind.mixer == "linear" else self.state_space
            return norms + ffn + (sizes.vector_parameters if sizes is not None else 0)
        if kind.mixer == "none":
            return norms + ffn
        norms += (2 * self.head_dim if self.qk_norm else 0) + (self.heads if self.attention_sinks else 0)
        if self.latent_attention is not None:
            norms += self.latent_attention.q_lora_rank + self.latent_attention.kv_lora_rank
        query_heads = (2 if self.attention_gate else 1) * self.heads
        qkv = self.head_dim * (query_heads + 2 * self.kv_heads) if self.bias or self.qkv_bias else 0
        out = self.width if self.bias or self.out_bias else 0
        return norms + qkv + out + ffn

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
            self.matrix_parameters(layer) + self.kind_vector_parameters(self.block_kind(layer))
            for layer in range(self.layers)
        )

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.outer_parameters + sum(
            self.active_matrix_parameters(layer) + self.kind_vector_parameters(self.block_kind(layer))
            for layer in range(self.layers)
        )

    @property
    def attention_width(self) -> int:
        """Query-key dimension plus value dimension, summed over heads: attention costs 2 FLOP per unit and score."""
        if self.latent_attention is None:
            return 2 * self.heads * self.head_dim
        mla = self.latent_attention
        return self.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
