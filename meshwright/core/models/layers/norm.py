"""The norms of the decoders. They compute in float32 at least, and return the dtype of the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:  # torch's operator computes in float32 at least, and rounds once
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm. Autocast lets it return float32, whatever the dtype of the residual stream is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)
