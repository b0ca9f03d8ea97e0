"""FLOPs of a step over all devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from meshwright.base.models.architecture import Architecture
from meshwright.planner.cost.terms.recomputation import recomputed_parts, recomputes_latent_projections
from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step over all devices."""

    model: float
    """forward and backward"""
    recomputed: float
    """what activation checkpointing repeats"""
    in_job_precision: float
    """the part of `model` whose matrix products have the precision of the job: all, unless that has 8 bits or fewer"""


@singledispatch
def step_flops(model: Any, job: PlannedJob) -> StepFlops:
    raise NotImplementedError(type(model))


@step_flops.register
def _(model: Architecture, job: PlannedJob) -> StepFlops:
    """Matrix products, causal attention, and the scans of other mixers."""
    tokens = job.tokens_per_step
    kinds = model.kind_counts.items()
    active = sum(count * model.active_kind_parameters(kind) for kind, count in kinds)
    matmul_flops = 6.0 * tokens * (active + model.vocab * model.width)
    attention_flops = 3.0 * tokens * sum(count * model.mixer_flops(kind, job.sequence) for kind, count in kinds)
    repeated = recomputed_parts(job.activation_checkpoint, job.trainer)
    recomputed = repeated.matmuls * 2.0 * tokens * active + repeated.mixer * attention_flops / 3
    mla = model.latent_attention
    if mla is not None and recomputes_latent_projections(job.activation_checkpoint, job.trainer):
        layers = sum(count for kind, count in kinds if kind.has_attention)
        recomputed += 2.0 * tokens * layers * mla.up_projections(model.heads)
    if job.trained.frozen:
        matmul_flops -= frozen_gradient_flops(model, job)
    total = matmul_flops + attention_flops
    return StepFlops(total, recomputed, quantized_flops(model, job) if job.is_quantized else total)


def frozen_gradient_flops(model: Architecture, job: PlannedJob) -> float:
    """FLOPs of the weight gradients that frozen matrices do not have, less those of low-rank factors; and of the
    backward pass of blocks before the first trained parameter.
    """
    trained, elements = job.trained, 0.0
    for kind, count in model.kind_counts.items():
        mixer, routed = model.mixer_parameters(kind), 0.0
        if kind.ffn == "moe":
            routed = model.experts_active * model.expert_parameters + model.width * model.experts
        ffn = model.active_kind_parameters(kind) - mixer - routed
        frozen = (1 - trained.mixer) * mixer + (1 - trained.ffn) * ffn + (1 - trained.routed) * routed
        unreached = (1 - trained.reached) * model.active_kind_parameters(kind)
        elements += count * (frozen + unreached - 3 * trained.factor_elements())
    return 2.0 * job.tokens_per_step * (elements + (0 if trained.head else model.vocab * model.width))


def quantized_flops(model: Architecture, job: PlannedJob) -> float:
    """FLOPs of the products with weights of blocks, without those of experts if the trainer keeps them in 16 bits."""
    active = sum(count * model.active_kind_parameters(kind) for kind, count in model.kind_counts.items())
    if not job.trainer.quantizes_experts:
        moe_layers = sum(count for kind, count in model.kind_counts.items() if kind.ffn == "moe")
        active -= moe_layers * (model.experts_active * model.expert_parameters + model.width * model.experts)
    return 6.0 * job.tokens_per_step * active
