"""Rotary positions: the tables of a forward pass, and the rotation of queries and keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.base.models.decoder_spec import RopeScaling


class RotaryTables(NamedTuple):
    """The rotary embedding of the positions of a forward pass, and the documents of its tokens."""

    cos: Tensor
    sin: Tensor
    """cosine and sine of every position and pair of dimensions, (sequence, head size / 2), or (batch, 1, sequence, head
    size / 2) where rows have their own positions
    """
    documents: Tensor | None
    """the document index of every token of the full sequence, (batch, sequence); None: one document per sequence"""


class RotaryEmbedding(nn.Module):
    """Computes the rotary tables of a forward pass."""

    def __init__(self, head_size: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_size, self.theta, self.scaling = head_size, theta, scaling

    def forward(self, tokens: int, dtype: torch.dtype, device: torch.device, documents: Tensor | None) -> RotaryTables:
        """The tables are computed in every forward pass, so there is no buffer to shard or to save."""
        positions = self.positions(tokens, device)
        if positions.ndim > 1:  # a position per row of a batch is the same in all heads
            positions = positions[:, None]
        return RotaryTables(*rotary_tables(positions, self.head_size, self.theta, dtype, self.scaling), documents)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(tokens, device=device)


def rotary_tables(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair of dimensions, (sequence, head size / 2)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=wide) / head_size
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, theta, scaling)
    angles = positions.to(wide)[..., None] * frequencies
    if scaling is None or scaling.amplitude == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scaling.amplitude, angles.sin() * scaling.amplitude


def scale_frequencies(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Linear scaling (arXiv:2306.15595), that of Llama 3.1, or YaRN (arXiv:2309.00071). The last two interpolate
    between low and high frequencies.
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = 1 - yarn_ramp(frequencies, theta, scaling)
    else:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        periods = scaling.original_context * frequencies / (2 * math.pi)  # of the original context
        kept = ((periods - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def yarn_ramp(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """0 for every high frequency, 1 for every low one, and linear in their index in between."""
    count = len(frequencies)

    def index(periods: float) -> float:
        """The index of the frequency with so many periods in the original context."""
        return count * math.log(scaling.original_context / (periods * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(index(scaling.high_frequency_factor)), 0)
    last = min(math.ceil(index(scaling.low_frequency_factor)), 2 * count - 1)
    width = last - first or 0.001
    indices = torch.arange(count, dtype=frequencies.dtype, device=frequencies.device)
    return ((indices - first) / width).clamp(0, 1)


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotates the dimension pairs (i, i + half) of each head, the layout of Llama checkpoints. Of several heads, it
    computes and stores those of a token next to each other, as projections do: attention returns its result in the
    same order, and neither the output projection nor the gradients of the projections need a copy.
    """
    cos, sin = rotary.cos, rotary.sin
    if x.ndim < 3:
        return rotate_halves(x, cos, sin)
    cos, sin = (table.unsqueeze(-2) if table.ndim < 3 else table.transpose(-3, -2) for table in (cos, sin))
    return rotate_halves(x.transpose(-3, -2), cos, sin).transpose(-3, -2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
