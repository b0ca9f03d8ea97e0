"""Uniform expert routing: fake tensors have no router scores, so every expert gets the same number of tokens."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.core.models.layers.experts import Experts
from meshwright.core.parallel.expert_parallel import AllToAllDispatch, DispatchedExperts


def route_uniformly(model: nn.Module) -> None:
    """Replaces the counts that a real run copies from the device to the host by uniform ones."""
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        bank = experts.bank
        bank.rows_per_expert = partial(rows_per_expert, bank)  # type: ignore[method-assign]
        if experts.capacity:
            experts.admit = partial(admit_uniformly, experts)  # type: ignore[method-assign]
        if isinstance(experts.dispatch, AllToAllDispatch):
            experts.dispatch.split_sizes = rows_per_rank  # type: ignore[method-assign, assignment]
    for forward in (module.forward for module in model.modules()):
        if isinstance(forward, DispatchedExperts):
            forward.dispatch.split_sizes = rows_per_rank  # type: ignore[method-assign, assignment]


def split_evenly(rows: int, parts: int) -> list[int]:
    """Divides the rows; the first parts get one more if they do not divide."""
    quotient, remainder = divmod(rows, parts)
    return [quotient + (index < remainder) for index in range(parts)]


def rows_per_expert(bank: nn.Module, _counts: object, rows: int) -> list[int]:
    gate, *_ = bank.weights()  # type: ignore[operator]
    return split_evenly(rows, len(gate))


def rows_per_rank(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """The rows that a rank sends to and receives from each rank of its expert group."""
    split = split_evenly(rows, counts.shape[1])
    return split, split


def admit_uniformly(experts: Experts, chosen: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
    """`Experts.admit` for a uniform load."""
    expert, order = chosen.flatten().sort(stable=True)
    capacity = math.ceil(experts.capacity * chosen.numel() / experts.count)
    position = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[expert]
    admitted = sum(min(rows, capacity) for rows in split_evenly(chosen.numel(), experts.count))
    return order.masked_fill(position >= capacity, 0)[:admitted].clone(), load.clamp(max=capacity)
