"""Rows of tokens sorted by expert, and back: a gather in both directions, forward and backward.

A choice is a pair (token, one of its experts), numbered token * active + position. `order` has the choice of every row;
`slots` has the row of every choice. The gradient of a gather by indices is a scatter-add, whose order of additions
varies on CUDA. Here the inverse permutation is known, so the gradient is a gather, too: it is deterministic, and a
compiler fuses it with what is around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """Which choice each row belongs to, and which row each choice has."""

    order: Tensor
    """the choice of every row, (rows)"""
    slots: Tensor
    """the row of every choice, (tokens, active)"""
    kept: Tensor | None = None
    """whether each choice has a row, (tokens, active); None: all have one"""

    def gather(self, tokens: Tensor) -> Tensor:
        """The rows of all choices, (tokens, width) -> (rows, width)."""
        rows: Tensor = GatherRows.apply(tokens, self.order, self.slots, self.kept)  # type: ignore[no-untyped-call]
        return rows

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The sum of every token's rows times their weights, (rows, width) -> (tokens, width), in the wider dtype."""
        out: Tensor = CombineRows.apply(rows, weights, self.order, self.slots, self.kept)  # type: ignore[no-untyped-call]
        return out


def row_order(order: Tensor, tokens: int, active: int) -> RowOrder:
    """The order of rows where `order` has all choices, or fewer of them."""
    rows, choices = len(order), tokens * active
    positions = torch.arange(rows, device=order.device)
    if rows == choices:
        return RowOrder(order, torch.empty_like(order).index_copy(0, order, positions).view(tokens, active))
    slots = order.new_zeros(choices).index_copy(0, order, positions)
    kept = torch.zeros(choices, dtype=torch.bool, device=order.device).index_fill(0, order, True)
    return RowOrder(order, slots.view(tokens, active), kept.view(tokens, active))


def rows_of_choices(rows: Tensor, slots: Tensor, kept: Tensor | None) -> Tensor:
    if not len(rows):
        return rows.new_zeros(*slots.shape, rows.shape[-1])
    chosen = rows[slots]
    return chosen if kept is None else chosen.masked_fill(~kept[..., None], 0)


class GatherRows(torch.autograd.Function):
    """(tokens, width) -> (rows, width). The gradient of a token is the sum of those of its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, slots: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(slots, kept)
        return tokens[order // slots.shape[1]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        slots, kept = ctx.saved_tensors
        return rows_of_choices(gradient, slots, kept).sum(dim=1), None, None, None


class CombineRows(torch.autograd.Function):
    """(rows, width) and (tokens, active) -> (tokens, width)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, slots: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weights, order, slots, kept)
        return (rows_of_choices(rows, slots, kept) * weights[..., None]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, order, slots, kept = ctx.saved_tensors
        of_rows = gradient[order // slots.shape[1]] * weights.flatten()[order][:, None]
        of_weights = (rows_of_choices(rows, slots, kept) * gradient[:, None]).sum(dim=-1)
        return of_rows.to(rows.dtype), of_weights.to(weights.dtype), None, None, None
