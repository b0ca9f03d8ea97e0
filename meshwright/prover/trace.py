"""What a training run computed, step by step: the record in which a run and its reference are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


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
    inputs: Tensor
    labels: Tensor
    """(global batch, sequence): what the ranks fed to the model, in global order"""
    gradients: dict[str, Tensor]
    """full tensors, before clipping, of the mean loss of the global batch and the balance loss"""
    parameters: dict[str, Tensor]
    """after the update; includes the buffers `...router.bias`"""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """the optimizer state after the update; empty if it is not known"""
    loss_scale: float = 1.0
    """the loss scale of the step"""
    other_inputs: list[Tensor] = field(default_factory=list)
    """what a custom model reads between its first input and its labels"""


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
