"""What a training run computed, step by step: the record in which a run and its reference are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

INPUTS = ("tokens", "labels", "documents")
"""The entries of a batch of built-in models; packed samples have the last one."""
PADDING = -(1 << 40)
"""Fills rows of micro-batches that are shorter than others when they are joined."""


@dataclass
class StepTrace:
    """One optimizer step."""

    step: int
    loss: float
    """the sum of the token losses of the global batch, divided by its number of valid tokens"""
    grad_norm: float
    """the norm over all parameters, before clipping"""
    lr: float
    tokens: int
    """the number of valid tokens of the global batch"""
    inputs: dict[str, Tensor]
    """what the ranks fed to the model, in global order: for the built-in models those of INPUTS"""
    gradients: dict[str, Tensor]
    """full tensors, before clipping, of the mean loss of the global batch and the balance loss"""
    parameters: dict[str, Tensor]
    """after the update; includes the buffers `...router.bias`"""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """the optimizer state after the update; empty if it is not known"""
    loss_scale: float = 1.0
    """the loss scale of the step"""


@dataclass
class Trace:
    """A training run from its first step to its last."""

    initial: dict[str, Tensor]
    """parameters and router biases before the first step"""
    steps: list[StepTrace] = field(default_factory=list)
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
    """(step, loss, valid tokens)"""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """after the last step: "<parameter>/exp_avg", "<parameter>/exp_avg_sq" and "<parameter>/step\""""


def input_name(number: int, inputs: int) -> str:
    """The name of an entry of a batch that is a tuple."""
    return "labels" if number == inputs - 1 else "tokens" if inputs == 2 else f"input {number}"


def join_rows(parts: list[Tensor]) -> Tensor:
    """Joins the rows of micro-batches, which may be padded to different lengths."""
    if len({part.shape[1:] for part in parts}) <= 1 or len({part.ndim for part in parts}) > 1:
        return torch.cat(parts)
    size = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    joined = torch.full((sum(map(len, parts)), *size), PADDING, dtype=torch.float64)
    first = 0
    for part in parts:
        joined[(slice(first, first + len(part)), *(slice(n) for n in part.shape[1:]))] = part.double()
        first += len(part)
    return joined
