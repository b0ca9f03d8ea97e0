"""A mixture of experts in place of a dense feed-forward: who goes where, and what keeps the experts evenly loaded.

Each token goes to the `active` experts of highest score + bias, and what they give is weighted by a softmax over the
scores of those (a single one by its share of the softmax over all). The bias moves against the load (`rebalance`;
https://arxiv.org/abs/2408.15664). Beside it a small loss of each sequence by itself (https://arxiv.org/abs/2412.19437,
equations 17 to 20) keeps single sequences from leaning on few experts. Both are of the whole batch and of whole
sequences, however these lie on ranks.

What a way of parallelism may want to replace is a submodule: `dispatch` (rows to their experts and back) and `whole`
(choices of a sequence, of which this process may see a piece).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config import ModelConfig
from meshwright.models.expert_weights import ExpertWeights, to_compute_dtype
from meshwright.models.feed_forward import FeedForward


class Router(nn.Module):
    """(tokens, width) -> every expert's score, the chosen experts, and their weights."""

    bias: Tensor

    def __init__(self, width: int, experts: int, active: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("bias", torch.zeros(experts))
        self.active = active

    def matrix(self) -> Tensor:
        """What this process computes with; a way of parallelism may put its own in place."""
        return self.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):  # half precision would make ties of close scores
            scores = nn.functional.linear(x, self.matrix().to(x.dtype))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # A stable sort, not topk: which of two equal scores topk takes is not said.
        ranked = (scores.detach() + self.bias).sort(dim=-1, descending=True, stable=True).indices
        chosen = ranked[:, : self.active].contiguous()
        if self.active == 1:  # alone it would weigh 1 whatever its score, and the router would learn nothing
            return scores, chosen, scores.softmax(dim=-1).gather(1, chosen)
        return scores, chosen, scores.gather(1, chosen).softmax(dim=-1)


class ExpertDispatch(nn.Module):
    """Brings rows, sorted by expert, to the bank and back: here it is in the same process."""

    def forward(self, bank: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        return bank(rows, counts)  # type: ignore[no-any-return]


class SequenceCounts(nn.Module):
    """How often each sequence chose each expert (sequences, experts), from what this process saw of it: all."""

    def forward(self, counts: Tensor) -> Tensor:
        return counts


class Experts(nn.Module):
    """(batch, sequence, width) -> the same. Without a capacity no token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.count, self.active, self.capacity = config.experts, config.experts_active, config.capacity_factor
        self.router = Router(config.width, config.experts, config.experts_active)
        self.bank = ExpertWeights(config.experts, config.width, config.ffn)
        inner = config.experts_shared * config.ffn
        self.shared = FeedForward(config.width, inner) if inner else None
        self.dispatch: nn.Module = ExpertDispatch()
        self.sequence_counts: nn.Module = SequenceCounts()
        self.auxiliary_scale: Tensor | None = None
        """the gradient of the step's loss with respect to `auxiliary`, as a scalar on the device; None: no such loss"""
        self.keep_auxiliary_graph = False
        """leave `auxiliary` with its graph, and give it no gradient: whoever asks adds it to the loss"""
        self.auxiliary: Tensor | None = None
        """the balance loss of the last pass, summed over its sequences; of a piece of each, this piece's share"""
        # Not buffers: those are the same on all ranks, and these are each rank's own.
        self.load: Tensor | None = None
        self.dropped: Tensor | None = None

    # A compiled block goes around it: its sizes depend on the data, and it counts.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores, chosen, weights = self.router(flat)
        counts = self.count_choices(chosen.view(len(x), x.shape[1] * self.active))
        load = counts.sum(dim=0)
        order, taken = self.admit(chosen, load)
        self.record_load(load, taken)
        # One row a visit and not a gather of tokens: its gradient is then a sum in a fixed order.
        visits = to_compute_dtype(flat)[:, None].expand(-1, self.active, -1).reshape(-1, flat.shape[-1])
        rows = self.dispatch(self.bank, visits.index_select(0, order), taken)
        back = rows.new_zeros(visits.shape).index_copy(0, order, rows).view(*chosen.shape, flat.shape[-1])
        out = (back * weights[..., None]).sum(dim=1).to(x.dtype).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        return self.attach_balance_loss(out, scores, counts)

    def count_choices(self, chosen: Tensor) -> Tensor:
        """How often each sequence's tokens chose each expert, (sequences, experts)."""
        every = torch.arange(self.count, device=chosen.device)
        return (chosen[..., None] == every).sum(dim=1)

    def admit(self, chosen: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
        """(visits, token by token, in the order of their experts; how many each expert takes)."""
        expert, order = chosen.flatten().sort(stable=True)
        if not self.capacity:
            return order, load
        most = math.ceil(self.capacity * chosen.numel() / self.count)
        place = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[expert]
        return order[place < most], load.clamp(max=most)  # the host waits here for how many are left

    @torch.no_grad()
    def record_load(self, load: Tensor, taken: Tensor) -> None:
        """Counts a training pass, once: where activations are recomputed, backward comes by again."""
        if not self.training or inside_backward():
            return
        before, dropped = self.recorded_load()
        self.load, self.dropped = before + load, dropped + (load - taken).sum()

    def take_load(self) -> tuple[Tensor, Tensor]:
        """(tokens that chose each expert, visits dropped) in the passes since the last call, on the device."""
        taken = self.recorded_load()
        self.load = self.dropped = None
        return taken

    def recorded_load(self) -> tuple[Tensor, Tensor]:
        if self.load is not None and self.dropped is not None:
            return self.load, self.dropped
        none = torch.zeros_like(self.router.bias, dtype=torch.int64)
        return none, none.sum()

    def attach_balance_loss(self, out: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        """Hangs the balance loss on `out`, which stays as it is: sum over sequences and experts of f P, where
        f = experts / (active T) * (how often the sequence's T tokens chose the expert), P = mean over them of the
        softmax of scores. f has no gradient, so that of P needs of the other pieces of a sequence their counts alone.
        """
        self.auxiliary = None
        wanted = self.auxiliary_scale is not None and self.training and torch.is_grad_enabled()
        if not wanted and not self.keep_auxiliary_graph:
            return out
        of_sequence = self.sequence_counts(counts).to(scores.dtype)  # a quotient of integers would be float32
        visits = of_sequence.sum(dim=1, keepdim=True).clamp(min=1)  # active T
        share = scores.softmax(dim=-1).view(*out.shape[:2], self.count).sum(dim=1) / (visits / self.active)
        auxiliary = (self.count * of_sequence / visits * share).sum()
        if self.keep_auxiliary_graph:
            self.auxiliary = auxiliary
            return out
        self.auxiliary = auxiliary.detach()
        pulled: Tensor = AttachAuxiliaryLoss.apply(out, auxiliary, self.auxiliary_scale)  # type: ignore[no-untyped-call]
        return pulled


class AttachAuxiliaryLoss(torch.autograd.Function):
    """Passes the first input on; in backward the second gets the third as its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, auxiliary: Tensor, pull: Tensor) -> Tensor:
        ctx.save_for_backward(pull.to(auxiliary))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (pull,) = ctx.saved_tensors
        return gradient, pull, None


def inside_backward() -> bool:
    """Whether autograd is at work on this thread: a forward pass there repeats an earlier one."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def update_router_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The bias after a step: up for experts with less than an even share of the load, which is that of all ranks."""
    wide = load.to(torch.float64)  # exact, so that an expert with the even share stays where it is
    return bias + rate * torch.sign(wide.mean() - wide).to(bias.dtype)
