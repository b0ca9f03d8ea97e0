"""All-to-all with a gradient: its backward is the same the other way round. torch's own loses the graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Splits = list[int] | None
"""How many rows each rank gets or gives; None: equally many."""


def all_to_all(rows: Tensor, group: dist.ProcessGroup, going: Splits = None, coming: Splits = None) -> Tensor:
    """Sends the first rows to the group's first rank and so on; gives what came, in the order of ranks. Every rank of
    the group must call it, forward and backward, also one that has nothing to send.
    """
    came: Tensor = AllToAllFunction.apply(rows, group, going, coming)  # type: ignore[no-untyped-call]
    return came


class AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, going: Splits, coming: Splits) -> Tensor:
        ctx.way = group, going, coming
        return sent(rows, group, going, coming)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, going, coming = ctx.way
        return sent(gradient, group, coming, going), None, None, None


def sent(rows: Tensor, group: dist.ProcessGroup, going: Splits, coming: Splits) -> Tensor:
    came = rows.new_empty(len(rows) if coming is None else sum(coming), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), coming, going, group=group)
    return came
