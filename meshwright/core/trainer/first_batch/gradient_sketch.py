"""What ranks get of a plain pass over the first samples: its loss, and a sketch of every gradient.

A sketch is small, so that ranks compare gradients without the full model in their memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLED = 1024
"""Elements of a gradient that a sketch has."""


@dataclass(frozen=True)
class GradientSketch:
    """The norm of a gradient, and some of its elements."""

    norm: float
    numel: int
    elements: Tensor
    rounding: float = 0.0
    """the relative error of the gradient in the precision of the run"""

    @classmethod
    def of(cls, gradient: Tensor, rounding: float = 0.0, scale: float = 1.0) -> GradientSketch:
        """The sketch of a gradient of the loss times `scale`."""
        flat = gradient.detach().reshape(-1)
        some = flat
        if len(flat) > SAMPLED:  # drawn, and not a stride: that would have a part of the rows or columns of some shapes
            where = torch.randint(len(flat), (SAMPLED,), generator=torch.Generator().manual_seed(0))
            some = flat[where.to(flat.device)]
        return cls(float(flat.double().norm()) / scale, len(flat), some.double().cpu() / scale, rounding)

    def error(self, other: GradientSketch, floor: float) -> float:
        """The relative error of the other gradient: of its elements, or of its norm. A norm of `floor` is nothing.
        Infinity if one of the gradients is not finite.
        """
        share = math.sqrt(len(self.elements) / max(1, self.numel))
        size = float(self.elements.norm()) + (self.norm + floor) * share
        of_elements = float((self.elements - other.elements).norm()) / max(size, 1e-300)
        of_norm = abs(self.norm - other.norm) / max(self.norm + floor, 1e-300)
        return max(of_elements, of_norm) if math.isfinite(of_elements + of_norm) else math.inf


@dataclass(frozen=True)
class PlainPass:
    """What a copy of the model computes of the first samples in one process."""

    flat: tuple[Tensor, ...]
    loss: float
    """the sum over valid targets"""
    rounding: float
    """the relative error of the loss in the precision of the run"""
    gradients: dict[str, GradientSketch]
    """by name, of every parameter that receives one"""
    training: bool
    """whether the model is in training mode, which it is unless it draws random numbers there"""
    scale: float
    """what the loss is multiplied by before backward, so that the gradients in the precision of the run are finite"""
    norm: float
    """the norm of all gradients"""
    error: float
    """the norm of the errors of all gradients in the precision of the run"""
    weights: float
    """the norm of all parameters"""
