"""Expert parallelism: the experts are divided among ranks, and rows travel to their experts and back by all-to-all.

Of n ranks and E experts, rank i holds experts [i E / n, (i + 1) E / n). A pass sends, forward: how many rows are meant
for each expert, the rows, and what their experts made of them; backward: the gradients of the last two. Every rank
makes each of these calls in the same order, also one that has nothing to send or to receive.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.model.bank import Bank, Matrices
from meshwright.model.experts import Dispatch, Whole


class AllToAll(Dispatch):
    """Rows, sorted by expert, to the ranks of `group` that hold their experts, through the bank, and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, bank: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = self.group.size()
        meant = torch.empty_like(counts)
        dist.all_to_all_single(meant, counts.contiguous(), group=self.group)
        both = torch.stack((counts, meant)).view(2, ranks, -1)  # (which way, rank, local expert)
        # The one place where the host waits for the device: it must know how many rows go to and come from each rank.
        going, coming = both.sum(dim=2).tolist()
        here = exchange(rows, going, coming, self.group)
        order = by_expert(both[1], sum(coming))
        made = bank(here.index_select(0, order), both[1].sum(dim=0))
        back = made.new_zeros(made.shape).index_copy(0, order, made)
        return exchange(back, coming, going, self.group)


def by_expert(counts: Tensor, rows: int) -> Tensor:
    """The order that sorts rows by local expert. They come by rank, and of each rank by expert; `counts` says how many
    of each, (rank, local expert).
    """
    ranks, local = counts.shape
    expert = torch.arange(local, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


def exchange(rows: Tensor, going: list[int], coming: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first rows to the group's first rank and so on; gives what came, in the order of ranks."""
    came: Tensor = Exchange.apply(rows, going, coming, group)  # type: ignore[no-untyped-call]
    return came


class Exchange(torch.autograd.Function):
    """An all-to-all whose backward is the same the other way round. torch's own loses the graph."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, going: list[int], coming: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = going, coming, group
        return sent(rows, going, coming, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        going, coming, group = ctx.way
        return sent(gradient, coming, going, group), None, None, None


def sent(rows: Tensor, going: list[int], coming: list[int], group: dist.ProcessGroup) -> Tensor:
    came = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), coming, going, group=group)
    return came


class SumOver(Whole):
    """How often each sequence chose each expert, where the ranks of `group` hold pieces of the same sequences."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


def compute_local(bank: Bank) -> None:
    """Has the bank compute with this rank's experts, once its parameters are DTensors cut along the first dimension."""

    def weights() -> Matrices:
        gate, up, down = (local(parameter) for parameter in (bank.gate, bank.up, bank.down))
        return gate, up, down

    bank.weights = weights  # type: ignore[method-assign]


def local(parameter: Tensor) -> Tensor:
    """With its graph; a bank that is gathered may come as a plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
