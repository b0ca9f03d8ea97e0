"""A differentiable all-to-all, whose backward swaps the split sizes. torch's own all-to-all has no backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

SplitSizes = list[int] | None
"""Rows per rank; None: the same number for every rank."""


def all_to_all(
    rows: Tensor, group: dist.ProcessGroup, send_sizes: SplitSizes = None, receive_sizes: SplitSizes = None
) -> Tensor:
    """Sends the first rows to the group's first rank and so on, and returns the received rows in rank order. Every rank
    of the group must call it, forward and backward, even with no rows to send.
    """
    received: Tensor = AllToAllFunction.apply(rows, group, send_sizes, receive_sizes)  # type: ignore[no-untyped-call]
    return received


class AllToAllFunction(torch.autograd.Function):
    """The autograd function of `all_to_all`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, send_sizes: SplitSizes, receive_sizes: SplitSizes
    ) -> Tensor:
        ctx.exchange = group, send_sizes, receive_sizes
        return exchange_rows(rows, group, send_sizes, receive_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, send_sizes, receive_sizes = ctx.exchange
        return exchange_rows(gradient, group, receive_sizes, send_sizes), None, None, None


def exchange_rows(rows: Tensor, group: dist.ProcessGroup, send_sizes: SplitSizes, receive_sizes: SplitSizes) -> Tensor:
    received = rows.new_empty(len(rows) if receive_sizes is None else sum(receive_sizes), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
    return received
