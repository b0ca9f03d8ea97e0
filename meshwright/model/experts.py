"""A mixture-of-experts feed-forward: a top-k router over experts, run as a plain loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Each token visits its `active` best experts, weighted by a softmax over their scores. No token is dropped."""

    def __init__(self, width: int, experts: Sequence[nn.Module], active: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(flat).topk(self.active, dim=-1)
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(x.dtype)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            # An expert nobody chose still runs, on no tokens: its gradient is then zero, not missing.
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, (expert(flat[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view_as(x)
