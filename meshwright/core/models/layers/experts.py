"""A mixture of experts in place of the dense feed-forward: routing, dispatch and load balancing.

Each token goes to the `active` experts with the highest score + bias. `Routing` says how their outputs are weighted,
and whether they come from a few groups of experts. Load balancing has two parts: the bias moves against the load after
every step (`update_router_bias`, arXiv:2408.15664), and a small auxiliary loss per sequence discourages routing one
sequence to few experts (arXiv:2412.19437, equations 17 to 20). Both are defined on the global batch and on full
sequences, so they do not depend on the layout.

Parallelism replaces two submodules: `dispatch` (moves rows to their experts and back) and `sequence_counts` (completes
the expert counts of a sequence of which this rank has a chunk).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.config import ModelConfig
from meshwright.base.models.routing import Routing
from meshwright.core.models.layers.expert_rows import row_order
from meshwright.core.models.layers.expert_weights import ExpertWeights, to_compute_dtype
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.torch_private import inside_backward


class Router(nn.Module):
    """(tokens, width) -> the scores of all experts, the chosen experts, and their weights."""

    bias: Tensor

    def __init__(self, width: int, experts: int, active: int, routing: Routing | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("bias", torch.zeros(experts))
        # A softmax over one score is constant, and the router would receive no gradient.
        self.active, self.routing = active, routing or Routing(normalize=active > 1)

    def matrix(self) -> Tensor:
        """The tensor to compute with; expert parallelism replaces this method."""
        return self.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision would turn close scores into ties
        with torch.autocast(x.device.type, enabled=False):
            scores = nn.functional.linear(x.to(wide), self.matrix().to(wide))
        chosen = self.choose(scores.detach() + self.bias)
        if self.routing.normalize:
            weights = scores.gather(1, chosen).softmax(dim=-1)
        else:
            weights = scores.softmax(dim=-1).gather(1, chosen)
        return scores, chosen, weights if self.routing.scale == 1.0 else weights * self.routing.scale

    def choose(self, scores: Tensor) -> Tensor:
        """The experts with the highest scores, best first; of equal scores, the first. topk does not specify their
        order, and a sort of short rows is slow on CUDA.
        """
        if self.routing.groups > 1:
            grouped = scores.unflatten(-1, (self.routing.groups, -1))
            ranked = grouped.amax(dim=-1).sort(dim=-1, descending=True, stable=True).indices
            excluded = torch.ones_like(ranked, dtype=torch.bool)
            excluded.scatter_(-1, ranked[:, : self.routing.groups_active], False)
            scores = grouped.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
        experts = torch.arange(scores.shape[-1], device=scores.device)
        best = [scores.argmax(dim=-1)]
        while len(best) < self.active:
            scores = scores.masked_fill(experts == best[-1][:, None], -torch.inf)
            best.append(scores.argmax(dim=-1))
        return torch.stack(best, dim=-1)


class ExpertDispatch(nn.Module):
    """Moves rows, sorted by expert, to their experts and back. Here all experts are on this rank."""

    def forward(self, expert_weights: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        return expert_weights(rows, counts)  # type: ignore[no-any-return]


class SequenceCounts(nn.Module):
    """The number of times each sequence chose each expert, (sequences, experts). Here this rank has full sequences."""

    def forward(self, counts: Tensor) -> Tensor:
        return counts


class Experts(nn.Module):
    """(batch, sequence, width) -> (batch, sequence, width). No token is dropped unless a capacity is set."""

    def __init__(self, config: ModelConfig, routing: Routing | None = None) -> None:
        super().__init__()
        self.count, self.active, self.capacity = config.experts, config.experts_active, config.capacity_factor
        self.router = Router(config.width, config.experts, config.experts_active, routing)
        self.bank = ExpertWeights(config.experts, config.width, config.ffn)
        inner = config.experts_shared * config.ffn
        self.shared = FeedForward(config.width, inner) if inner else None
        self.dispatch: nn.Module = ExpertDispatch()
        self.sequence_counts: nn.Module = SequenceCounts()
        self.auxiliary_scale: Tensor | None = None
        """the gradient of the step's loss with respect to `auxiliary`, a scalar tensor; None: no auxiliary loss"""
        self.keep_auxiliary_graph = False
        """keep the graph of `auxiliary` and attach no gradient; the caller adds it to the loss"""
        self.auxiliary: Tensor | None = None
        """the balance loss of the last forward pass, summed over sequences; of sequence chunks, their share of it"""
        # These are not buffers: buffers are equal on all ranks, and these counts are local.
        self.load: Tensor | None = None
        self.dropped: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen, weights = self.router(tokens)
        counts = self.count_choices(chosen.view(len(x), x.shape[1] * self.active))
        load = counts.sum(dim=0)
        order, accepted = self.admit(chosen, load)
        self.record_load(load, accepted)
        rows = row_order(order, *chosen.shape)
        outputs = self.dispatch(self.bank, rows.gather(to_compute_dtype(tokens)), accepted)
        out = rows.combine(outputs, weights).to(x.dtype).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        return self.attach_balance_loss(out, scores, counts)

    def count_choices(self, chosen: Tensor) -> Tensor:
        """The number of times each sequence's tokens chose each expert, (sequences, experts)."""
        experts = torch.arange(self.count, device=chosen.device)
        return (chosen[..., None] == experts).sum(dim=1)

    def admit(self, chosen: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
        """(indices of rows sorted by expert, number of rows per expert); rows above the capacity are dropped."""
        expert, order = chosen.flatten().sort(stable=True)
        return self.drop(expert, order, load) if self.capacity else (order, load)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def drop(self, expert: Tensor, order: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
        """Drops rows above the capacity of their expert. The number of the others depends on the data, so a compiled
        block leaves this method out of its graph.
        """
        limit = math.ceil(self.capacity * len(order) / self.count)
        position = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[expert]
        return order[position < limit], load.clamp(max=limit)  # the host waits here for the number of rows

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def record_load(self, load: Tensor, accepted: Tensor) -> None:
        """Counts a training pass once: activation checkpointing repeats the forward pass inside backward."""
        if not self.training or inside_backward():
            return
        recorded, dropped = self.recorded_load()
        self.load, self.dropped = recorded + load, dropped + (load - accepted).sum()

    def take_load(self) -> tuple[Tensor, Tensor]:
        """(tokens that chose each expert, rows dropped) of the passes since the last call, on the device."""
        recorded = self.recorded_load()
        self.load = self.dropped = None
        return recorded

    def recorded_load(self) -> tuple[Tensor, Tensor]:
        if self.load is not None and self.dropped is not None:
            return self.load, self.dropped
        zeros = torch.zeros_like(self.router.bias, dtype=torch.int64)
        return zeros, zeros.sum()

    def attach_balance_loss(self, out: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        """Attaches the gradient of the balance loss to `out`, whose value does not change.

        The loss is the sum over sequences and experts of f P, with f = experts / (active T) * (the number of times the
        sequence's T tokens chose the expert) and P = the mean over its tokens of the softmax of scores. f has no
        gradient, so a rank with a chunk of the sequence needs only the counts of the other chunks.
        """
        self.auxiliary = None
        enabled = self.auxiliary_scale is not None and self.training and torch.is_grad_enabled()
        if not enabled and not self.keep_auxiliary_graph:
            return out
        of_sequence = self.sequence_counts(counts).to(scores.dtype)  # a quotient of integers would be float32
        choices = of_sequence.sum(dim=1, keepdim=True).clamp(min=1)  # active T
        mean_probability = scores.softmax(dim=-1).view(*out.shape[:2], self.count).sum(dim=1) / (choices / self.active)
        auxiliary = (self.count * of_sequence / choices * mean_probability).sum()
        if self.keep_auxiliary_graph:
            self.auxiliary = auxiliary
            return out
        self.auxiliary = auxiliary.detach()
        attached: Tensor = AttachAuxiliaryLoss.apply(out, auxiliary, self.auxiliary_scale)  # type: ignore[no-untyped-call]
        return attached


class AttachAuxiliaryLoss(torch.autograd.Function):
    """Returns the first input; in backward, the second input receives the third as its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, auxiliary: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(auxiliary))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale, None


@torch.no_grad()
def update_router_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The bias after a step: it rises for experts with less than the mean load and falls for those with more. `load` is
    summed over all ranks.
    """
    exact_load = load.to(torch.float64)  # exact, so that an expert with the mean load keeps its bias
    return bias + rate * torch.sign(exact_load.mean() - exact_load).to(bias.dtype)
