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
    reached = job.trained.reached
    attention_flops *= 1 - 2 / 3 * (1 - reached)
    matmul_flops -= frozen_flops(model, job)
    total = matmul_flops + attention_flops
    return StepFlops(total, reached * recomputed, quantized_flops(model, job) if job.is_quantized else total)


def frozen_flops(model: Architecture, job: PlannedJob) -> float:
    """FLOPs of matrix products that backward does not have, less those of low-rank factors."""
    elements = frozen_elements(model, job) - 3 * model.layers * job.trained.factor_elements()
    return 2.0 * job.tokens_per_step * (elements + (0 if job.trained.head else model.vocab * model.width))


def frozen_elements(model: Architecture, job: PlannedJob, *, experts: bool = True) -> float:
    """Active elements of the blocks, and of their routed experts, whose weight gradients backward does not have since
    they are frozen; those before the first trained parameter count again, for their input gradients.
    """
    trained, elements = job.trained, 0.0
    for kind, count in model.kind_counts.items():
        mixer, routed = model.mixer_parameters(kind), 0.0
        if kind.ffn == "moe":
            routed = model.experts_active * model.expert_parameters + model.width * model.experts
        ffn = model.active_kind_parameters(kind) - mixer - routed
        frozen = (1 - trained.mixer) * mixer + (1 - trained.ffn) * ffn + experts * (1 - trained.routed) * routed
        elements += count * (frozen + (1 - trained.reached) * (mixer + ffn + experts * routed))
    return elements


def quantized_flops(model: Architecture, job: PlannedJob) -> float:
    """FLOPs of the products with weights of blocks, without those of experts if the trainer keeps them in 16 bits."""
    active = sum(count * model.active_kind_parameters(kind) for kind, count in model.kind_counts.items())
    if not job.trainer.quantizes_experts:
        moe_layers = sum(count for kind, count in model.kind_counts.items() if kind.ffn == "moe")
        active -= moe_layers * (model.experts_active * model.expert_parameters + model.width * model.experts)
    frozen = frozen_elements(model, job, experts=job.trainer.quantizes_experts)
    return job.tokens_per_step * (6.0 * active - 2.0 * frozen)
