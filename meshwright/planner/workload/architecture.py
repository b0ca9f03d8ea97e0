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

    query: int
    """width that queries are compressed to; 0: they are not"""
    keys: int
    """width that keys and values are compressed to, together"""
    plain: int
    """size of a head's keys and queries without a position"""
    rotary: int
    """size of the part with a position, one for all heads of the keys"""
    value: int
    """size of a head's values"""


@dataclass(frozen=True)
class Architecture:
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    """size of a head"""
    ffn: int
    """inner width of a dense feed-forward"""
    vocab: int
    gated: bool = True
    """three matrices in a feed-forward (SwiGLU); else two"""
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    """whether all linear layers but the head have biases"""
    qkv_bias: bool = False
    """whether queries, keys and values have, where not all have"""
    out_bias: bool = False
    """whether the output of attention has"""
    ffn_bias: bool = False
    """whether a dense feed-forward has"""
    head_norms: bool = False
    """a norm of the size of a head on queries, and one on keys"""
    parallel: bool = False
    """attention and feed-forward read the same input, and are added together"""
    window: int = 0
    """tokens that attention looks back; 0: all"""
    positions: int = 0
    """rows of learned positions; 0: rotary ones or none"""
    experts: int = 0
    experts_active: int = 0
    experts_shared: int = 0
    expert_ffn: int = 0
    """inner width of one expert"""
    shared_gate: bool = False
    """the shared experts' output is scaled by a gate of their own"""
    dense_layers: int = 0
    """layers at the beginning that have a dense feed-forward where the others have experts"""
    latent: LatentAttention | None = None

    @classmethod
    def of(cls, model: ModelConfig, name: str = "") -> Architecture:
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
            tied=model.tie,
            experts=model.experts,
            experts_active=model.experts_active if model.experts else 0,
            experts_shared=model.experts_shared,
            expert_ffn=model.ffn if model.experts else 0,
        )

    @property
    def matrices(self) -> int:
        """of a feed-forward"""
        return 3 if self.gated else 2

    @property
    def attention_weights(self) -> int:
        """Numbers in one layer's matrices of attention."""
        if self.latent is None:
            return self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        mla = self.latent
        query = mla.plain + mla.rotary
        asked = mla.query * (self.width + self.heads * query) if mla.query else self.width * self.heads * query
        told = self.width * (mla.keys + mla.rotary) + mla.keys * self.heads * (mla.plain + mla.value)
        return asked + told + self.heads * mla.value * self.width

    @property
    def dense_weights(self) -> int:
        return self.matrices * self.width * self.ffn

    @property
    def expert_weights(self) -> int:
        """of one expert"""
        return self.matrices * self.width * self.expert_ffn

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def expert_layers(self) -> int:
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    def visited_weights(self, layer: int) -> int:
        """Numbers in the matrices that one token of a layer meets."""
        if not self.has_experts(layer):
            return self.attention_weights + self.dense_weights
        met = (self.experts_active + self.experts_shared) * self.expert_weights
        return self.attention_weights + met + self.width * (self.experts + self.shared_gate)

    def layer_weights(self, layer: int) -> int:
        """Numbers in all of a layer's matrices."""
        idle = (self.experts - self.experts_active) * self.expert_weights if self.has_experts(layer) else 0
        return self.visited_weights(layer) + idle

    @property
    def vectors(self) -> int:
        """Numbers in one layer's norms and biases."""
        norms = 2 * self.width * (2 if self.norm == "layer" else 1) + (2 * self.head if self.head_norms else 0)
        if self.latent is not None:
            norms += self.latent.query + self.latent.keys
        asked = self.head * (self.heads + 2 * self.kv_heads) if self.bias or self.qkv_bias else 0
        out = self.width if self.bias or self.out_bias else 0
        dense = (self.bias or self.ffn_bias) and not self.experts
        return norms + asked + out + ((self.matrices - 1) * self.ffn + self.width if dense else 0)

    @property
    def ends(self) -> int:
        """Numbers in the embedding, the head unless it is tied, positions and the last norm."""
        last = self.width * (2 if self.norm == "layer" else 1)
        return self.vocab * self.width * (1 if self.tied else 2) + self.positions * self.width + last

    @cached_property
    def parameters(self) -> int:
        return self.ends + sum(self.layer_weights(layer) + self.vectors for layer in range(self.layers))

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        return self.ends + sum(self.visited_weights(layer) + self.vectors for layer in range(self.layers))

    @property
    def attended(self) -> int:
        """Numbers of all heads that a query and a key are multiplied in, and of the values: the sum of both."""
        if self.latent is None:
            return 2 * self.heads * self.head
        return self.heads * (self.latent.plain + self.latent.rotary + self.latent.value)
