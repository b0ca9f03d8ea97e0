"""The weights of all routed experts in three tensors, and the SwiGLU that applies each expert to its rows.

`grouped_experts` runs all experts in one grouped matrix product where torch's kernel supports it; `looped_experts` runs
them one by one elsewhere, and is the reference that the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.torch_private import grouped_mm

GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_ALIGNMENT = 16
"""The kernel needs rows whose size in bytes is a multiple of this."""

ExpertMatrices = tuple[Tensor, Tensor, Tensor]
"""gate, up and down of every expert"""


class ExpertWeights(nn.Module):
    """`gate` and `up` have shape (experts, inner, width), `down` has shape (experts, width, inner)."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def weights(self) -> ExpertMatrices:
        """The tensors to compute with; expert parallelism replaces this method."""
        return self.gate, self.up, self.down

    def forward(self, rows: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
        """Applies the experts to rows that are sorted by expert; `counts` has the number of rows of each expert."""
        rows = to_compute_dtype(rows)
        gate, up, down = map(to_compute_dtype, self.weights())
        if supports_grouped_mm(rows, gate):
            run = grouped_experts if rows.dtype == torch.bfloat16 else untraced_grouped_experts
            return run(rows, torch.as_tensor(counts, device=rows.device), (gate, up, down))
        return looped_experts(rows, self.rows_per_expert(counts, len(rows)), (gate, up, down))

    def rows_per_expert(self, counts: Tensor | Sequence[int], _rows: int) -> Tensor | Sequence[int]:
        """The counts for the loop; the simulator replaces this method, since fake tensors have no values."""
        return counts


def to_compute_dtype(x: Tensor) -> Tensor:
    """Casts as autocast does for nn.Linear; autocast does not cover grouped products."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def supports_grouped_mm(rows: Tensor, gate: Tensor) -> bool:
    """Whether the grouped kernel supports these tensors. It has no backward for zero rows."""
    _, inner, width = gate.shape
    aligned = all(size * rows.element_size() % ROW_ALIGNMENT == 0 for size in (inner, width))
    return grouped_mm is not None and rows.dtype in GROUPED_MM_DTYPES and aligned and len(rows) > 0


def grouped_experts(rows: Tensor, counts: Tensor, weights: ExpertMatrices) -> Tensor:
    """All experts in one call per matrix. The counts stay on the device, so the host does not wait."""
    assert grouped_mm is not None
    gate, up, down = (matrix.transpose(-2, -1) for matrix in weights)
    offsets = counts.cumsum(0, dtype=torch.int32)
    rows = rows.contiguous()
    hidden = F.silu(grouped_mm(rows, gate, offs=offsets)) * grouped_mm(rows, up, offs=offsets)
    out: Tensor = ContiguousGradient.apply(grouped_mm(hidden, down, offs=offsets))  # type: ignore[no-untyped-call]
    return out


untraced_grouped_experts = torch.compiler.disable(grouped_experts)
"""Compiled blocks leave it out of their graph: torch.compile knows the kernel in bfloat16 only."""


class ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient is contiguous. The grouped kernel does not support an expanded one."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def looped_experts(rows: Tensor, counts: Tensor | Sequence[int], weights: ExpertMatrices) -> Tensor:
    """One expert after the other. An expert without rows runs on an empty tensor, so that its gradient is zero and not
    missing.
    """
    rows_of_experts = rows.split(counts.tolist() if isinstance(counts, Tensor) else list(counts))
    experts = zip(rows_of_experts, *(matrix.unbind() for matrix in weights), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in experts])
