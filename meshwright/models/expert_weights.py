"""The experts' weights in one place: each row of a batch that is sorted by expert goes through its own SwiGLU.

In one call for all experts (`grouped`) where torch's kernel takes it, and expert by expert (`looped`) elsewhere; the
loop is also what the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""(rows, one matrix an expert, offs=last row of each) -> rows; older releases have it under a private name."""
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16
"""Bytes that a row must be a multiple of for the kernel."""

Matrices = tuple[Tensor, Tensor, Tensor]
"""gate, up and down of every expert"""


class ExpertWeights(nn.Module):
    """`gate` and `up` of shape (experts, inner, width), `down` of (experts, width, inner)."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def weights(self) -> Matrices:
        """What this process computes with; a way of parallelism may put its own in place."""
        return self.gate, self.up, self.down

    def forward(self, rows: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
        """`rows` begin with those of the first expert; `counts` says how many there are of each."""
        rows = to_compute_dtype(rows)
        gate, up, down = map(to_compute_dtype, self.weights())
        if supports_grouped_mm(rows, gate):
            return grouped_experts(rows, torch.as_tensor(counts, device=rows.device), (gate, up, down))
        return looped_experts(rows, self.rows_per_expert(counts, len(rows)), (gate, up, down))

    def rows_per_expert(self, counts: Tensor | Sequence[int], _rows: int) -> Tensor | Sequence[int]:
        """Rows of each expert, as the loop wants them; where nothing is computed they are not known."""
        return counts


def to_compute_dtype(x: Tensor) -> Tensor:
    """In the precision in which nn.Linear would take it: autocast knows nothing of grouped products."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def supports_grouped_mm(rows: Tensor, gate: Tensor) -> bool:
    """Whether the kernel takes these; it also refuses the gradient of no rows at all."""
    _, inner, width = gate.shape
    aligned = all(size * rows.element_size() % ALIGNMENT == 0 for size in (inner, width))
    return GROUPED_MM is not None and rows.dtype in GROUPED_MM_DTYPES and aligned and len(rows) > 0


def grouped_experts(rows: Tensor, counts: Tensor, weights: Matrices) -> Tensor:
    """All experts at once. Counts stay on the device: nothing waits for them."""
    assert GROUPED_MM is not None
    gate, up, down = (matrix.transpose(-2, -1) for matrix in weights)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = rows.contiguous()
    out: Tensor = GROUPED_MM(
        F.silu(GROUPED_MM(rows, gate, offs=ends)) * GROUPED_MM(rows, up, offs=ends), down, offs=ends
    )
    if out.requires_grad:
        out.register_hook(torch.Tensor.contiguous)  # the kernel refuses a gradient that is one number spread out
    return out


def looped_experts(rows: Tensor, counts: Tensor | Sequence[int], weights: Matrices) -> Tensor:
    """Expert by expert. One without rows runs on none: its gradient is then zero, not missing."""
    pieces = rows.split(counts.tolist() if isinstance(counts, Tensor) else list(counts))
    each = zip(pieces, *(matrix.unbind() for matrix in weights), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in each])
