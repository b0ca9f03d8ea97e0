"""Experts of imagined tensors: which of them a token chooses is not known, so every expert gets an even share."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.models.experts import Experts
from meshwright.parallel.expert_parallel import AllToAllDispatch


def share_evenly(model: nn.Module) -> bool:
    """Puts even shares where the host would read numbers from the device; whether there was anything to do."""
    found = [module for module in model.modules() if isinstance(module, Experts)]
    for experts in found:
        bank = experts.bank
        bank.rows_per_expert = partial(of_experts, bank)  # type: ignore[method-assign]
        if experts.capacity:
            experts.admit = partial(admitted, experts)  # type: ignore[method-assign]
        if isinstance(experts.dispatch, AllToAllDispatch):
            experts.dispatch.split_sizes = of_ranks  # type: ignore[method-assign, assignment]
    return bool(found)


def even(rows: int, parts: int) -> list[int]:
    """The first get one more where they do not divide."""
    each, left = divmod(rows, parts)
    return [each + (part < left) for part in range(parts)]


def of_experts(bank: nn.Module, _counts: object, rows: int) -> list[int]:
    gate, *_ = bank.weights()  # type: ignore[operator]
    return even(rows, len(gate))


def of_ranks(both: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """As many rows come as go."""
    share = even(rows, both.shape[1])
    return share, share


def admitted(experts: Experts, chosen: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
    """`Experts.admit` where every expert is chosen equally often."""
    expert, order = chosen.flatten().sort(stable=True)
    most = math.ceil(experts.capacity * chosen.numel() / experts.count)
    place = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[expert]
    kept = sum(min(rows, most) for rows in even(chosen.numel(), experts.count))
    return order.masked_fill(place >= most, 0)[:kept].clone(), load.clamp(max=most)
