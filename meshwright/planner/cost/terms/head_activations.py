"""Activation memory of the final norm, the head and the loss, for one micro-batch; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any

from meshwright.base.models.architecture import Architecture
from meshwright.planner.cost.terms.activations import ActivationSettings
from meshwright.planner.cost.terms.module_activations import matmul_inputs, norm_activations
from meshwright.planner.workload.trainer_profiles import LOSS_CHUNK_TOKENS


@dataclass(frozen=True)
class HeadActivations:
    """Bytes of the final norm, the head and the loss for one micro-batch."""

    saved: float
    """saved from forward to backward, without logits"""
    logits: float
    """logits that are saved from forward to backward"""
    forward_peak: float
    """in addition, while the loss is computed"""
    backward_peak: float
    """in addition, when the backward pass of the loss begins"""
    logit_gradient: float
    """the gradient of the logits, while the gradient of the head's weight is computed"""
    deferred: float
    """gradients that wait for the weight gradients of a split backward pass"""


@singledispatch
def head_activations(model: Any, settings: ActivationSettings) -> HeadActivations:
    """Bytes of the final norm, the head and the loss for one micro-batch."""
    raise NotImplementedError(type(model))


@head_activations.register
@cache
def _(model: Architecture, settings: ActivationSettings) -> HeadActivations:
    residual = settings.residual_stream(model.width)
    trains_head = settings.trained.head
    norm = norm_activations(model, settings, settings.trained.after)
    saved = residual + norm + matmul_inputs(model, settings, 1, float(trains_head))
    if settings.autocast and not (settings.trainer.master_bytes and trains_head):
        saved += model.vocab * model.width / settings.layout.tensor * settings.compute_bytes
    logits = settings.tokens * model.vocab / settings.layout.tensor
    if settings.trainer.loss_chunk_bytes:
        # Forward computes the gradients of the hidden states, in place of what it would save, and of the weight.
        hidden = settings.tokens * model.width * settings.compute_bytes
        weight = model.vocab * model.width / settings.layout.tensor
        most = settings.trainer.loss_chunk_bytes / (1 if settings.activation_checkpoint == "none" else 2)
        share = min(1.0, LOSS_CHUNK_TOKENS / settings.tokens)
        chunk = min(most, share * logits * settings.compute_bytes)
        saved = residual + norm + hidden
        if not trains_head:
            return HeadActivations(saved, 0.0, chunk + hidden, 0.0, 0, 2 * settings.trained.after * residual)
        gradient, scaled = weight * settings.reduction_bytes, weight * settings.compute_bytes
        return HeadActivations(saved, gradient, chunk + hidden, scaled, 0, 2 * residual)
    if settings.trainer.logit_bytes:
        peak = settings.trainer.logit_bytes * logits
        return HeadActivations(saved, 0, peak, peak, settings.compute_bytes * logits, 0)
    vocab_parallel = settings.layout.tensor > 1
    wide, narrow = logits * settings.reduction_bytes, logits * settings.compute_bytes
    upcast = wide if settings.compute_bytes != settings.reduction_bytes else 0
    deferred = (wide if trains_head else 0.0) + 2 * settings.trained.after * residual
    forward_peak = narrow + upcast + (wide if vocab_parallel else 0)
    return HeadActivations(
        saved, wide, forward_peak, (3 if vocab_parallel else 2) * wide, wide, deferred
    )  # fmt: skip
