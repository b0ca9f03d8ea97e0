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
STRIDE = 0x9E3779B97F4A7C15 >> 1
"""The golden ratio as a step through the elements of a gradient, so that a sketch has some of all rows and columns."""


@dataclass(frozen=True)
class GradientSketch:
    """The norm of a gradient, and some of its elements."""

    norm: float
    numel: int
    elements: Tensor
    rounding: float = 0.0
    """the relative error of the gradient in the precision of the run"""

    @classmethod
    def of(cls, gradient: Tensor, rounding: float = 0.0) -> GradientSketch:
        flat = gradient.detach().reshape(-1)
        where = torch.arange(min(SAMPLED, len(flat)), device=flat.device)
        if len(flat) > SAMPLED:
            where = where * (STRIDE % len(flat)) % len(flat)
        return cls(float(flat.double().norm()), len(flat), flat[where].double().cpu(), rounding)

    def error(self, other: GradientSketch, floor: float) -> float:
        """The relative error of the other gradient: of its elements, or of its norm. A norm of `floor` is nothing."""
        share = math.sqrt(len(self.elements) / max(1, self.numel))
        size = float(self.elements.norm()) + (self.norm + floor) * share
        of_elements = float((self.elements - other.elements).norm()) / max(size, 1e-300)
        return max(of_elements, abs(self.norm - other.norm) / max(self.norm + floor, 1e-300))


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
