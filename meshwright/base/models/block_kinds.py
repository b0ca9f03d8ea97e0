"""Kinds of blocks of hybrid models: attention, sliding windows, state-space and linear-attention layers; torch-free.

A block has a mixer, which moves information between tokens, and a feed-forward; either may be missing: a layer of
Nemotron-H is one or the other. H is the width of the model.

| mixer | matrices | vectors | FLOPs per token in forward, besides the matrices |
|---|---|---|---|
| attention | Q, K, V, O | norms and biases | 2 (D_qk + D_v) per head and attended token |
| window | the same | the same | the same, at most `sliding_window` tokens |
| mamba2 (SSD, arXiv:2405.21060) | H (2 I + 2 G N + A) + I H | (I + 2 G N) (k + 1) + 3 A + I | 2 c (G N + I) + 4 N I |
| mamba (arXiv:2312.00752) | 2 H I + I (R + 2 N) + R I + I H | I (k + 1) + I N + 2 I + R + 2 N | 9 I N |
| linear | H (2 K + 2 V + 2 A) + V H | (2 K + V) k + 2 A + V / A | A (6 d_k d_v + 2 c (3 d_k + 2 d_v)) |

I is the inner width, N the state size, G the groups of B and C, A the heads, k the width of the convolution, R the
rank of the step size, c the chunk length of the parallel form, K and V the widths of all keys and values. Linear
attention is the gated delta net (arXiv:2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["attention", "window", "mamba", "mamba2", "linear", "none"]
FeedForward = Literal["dense", "moe", "none"]


@dataclass(frozen=True)
class BlockKind:
    """What one block consists of."""

    mixer: Mixer = "attention"
    ffn: FeedForward = "dense"

    @property
    def has_attention(self) -> bool:
        return self.mixer in ("attention", "window")

    @property
    def has_scan(self) -> bool:
        """Whether the mixer is a recurrence."""
        return self.mixer in ("mamba", "mamba2", "linear")

    @property
    def sublayers(self) -> int:
        """Mixer and feed-forward, each with a norm before it."""
        return (self.mixer != "none") + (self.ffn != "none")


@dataclass(frozen=True)
class StateSpace:
    """Sizes of a selective state-space layer (Mamba or Mamba-2)."""

    inner: int
    """inner width, over all heads"""
    state: int
    """state size per channel"""
    conv: int = 4
    """width of the causal convolution"""
    heads: int = 0
    """heads of Mamba-2; 0 for Mamba"""
    groups: int = 1
    """groups of heads that share B and C"""
    rank: int = 0
    """rank of the step size of Mamba"""
    chunk: int = 256
    """tokens of a chunk, inside of which Mamba-2 multiplies matrices"""
    inner_norms: bool = False
    """whether the step size, B and C of Mamba are normalized (Jamba)"""

    @property
    def input_width(self) -> int:
        """Outputs of the first projection."""
        if self.heads:
            return 2 * self.inner + 2 * self.groups * self.state + self.heads
        return 2 * self.inner

    def matrix_parameters(self, width: int) -> int:
        ends = width * self.input_width + self.inner * width
        if self.heads:
            return ends
        return ends + self.inner * (self.rank + 2 * self.state) + self.rank * self.inner

    @property
    def vector_parameters(self) -> int:
        """Convolution with bias, A, D, the bias of the step size, and norms."""
        if self.heads:
            return self.conv_width * (self.conv + 1) + 3 * self.heads + self.inner
        norms = self.rank + 2 * self.state if self.inner_norms else 0
        return self.inner * (self.conv + 1) + self.inner * self.state + 2 * self.inner + norms

    def scan_flops(self) -> float:
        """FLOPs per token of the scan in forward."""
        if not self.heads:
            return 9.0 * self.inner * self.state
        within = 2.0 * self.chunk * (self.groups * self.state + self.inner)
        return within + 4.0 * self.state * self.inner

    @property
    def output_width(self) -> int:
        """Elements per token of the output of the scan."""
        return self.inner

    @property
    def conv_width(self) -> int:
        """Channels of the causal convolution."""
        return self.inner + (2 * self.groups * self.state if self.heads else 0)

    @property
    def chunk_states(self) -> float:
        """Elements per token of the states at the ends of chunks; those of Mamba are recomputed in backward."""
        return self.inner * self.state / self.chunk if self.heads else 0.0

    @property
    def scan_elements(self) -> float:
        """Elements per token that the scan and the convolution read and write in forward."""
        return 2 * self.conv_width + 3 * self.inner + 2 * self.chunk_states

    @property
    def cache_elements(self) -> int:
        """Elements of the state of one sequence in generation."""
        return self.inner * self.state + self.conv_width * (self.conv - 1)


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of a linear-attention layer with the gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    """dimension of one key head"""
    value_dim: int
    """dimension of one value head"""
    conv: int = 4
    """width of the causal convolution"""
    chunk: int = 64
    """tokens of a chunk, inside of which the layer multiplies matrices"""

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def input_width(self) -> int:
        """Outputs of the first projections: queries, keys, values, output gate, step size and decay."""
        return 2 * self.keys + 2 * self.values + 2 * self.value_heads

    def matrix_parameters(self, width: int) -> int:
        return width * self.input_width + self.values * width

    @property
    def vector_parameters(self) -> int:
        """Convolution, decay, bias of the step size, and the norm of a head."""
        return self.conv_width * self.conv + 2 * self.value_heads + self.value_dim

    def scan_flops(self) -> float:
        """FLOPs per token of the chunked delta rule in forward."""
        within = 2.0 * self.chunk * (3 * self.key_dim + 2 * self.value_dim)
        return self.value_heads * (6.0 * self.key_dim * self.value_dim + within)

    @property
    def output_width(self) -> int:
        """Elements per token of the output of the scan."""
        return self.values

    @property
    def conv_width(self) -> int:
        """Channels of the causal convolution."""
        return 2 * self.keys + self.values

    @property
    def chunk_states(self) -> float:
        """Elements per token of the states at the ends of chunks."""
        return self.value_heads * self.key_dim * self.value_dim / self.chunk

    @property
    def scan_elements(self) -> float:
        """Elements per token that the scan and the convolution read and write in forward."""
        return 2 * self.conv_width + 3 * self.values + 2 * self.chunk_states

    @property
    def cache_elements(self) -> int:
        """Elements of the state of one sequence in generation."""
        state = self.value_heads * self.key_dim * self.value_dim
        return state + self.conv_width * (self.conv - 1)


def attended_tokens(sequence: int, window: int = 0) -> float:
    """The mean number of earlier tokens that a token attends to: half of the sequence, or fewer with a window."""
    if not window or window >= sequence:
        return sequence / 2
    return window - window * window / (2 * sequence)
