"""FLOPs of a step over all devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from meshwright.models.architecture import Architecture
from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step over all devices."""

    model: float
    """forward and backward"""
    recomputed: float
    """what activation checkpointing repeats"""


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
    recomputed = 0.0
    if job.activation_checkpoint in ("full", "alternate"):
        fraction = 0.5 if job.activation_checkpoint == "alternate" else 1.0
        head_flops = 6.0 * tokens * model.vocab * model.width
        recomputed = fraction * (matmul_flops - head_flops + attention_flops) / 3
    elif job.activation_checkpoint == "selective" and not job.trainer.flash_attention:
        recomputed = attention_flops / 3
    return StepFlops(matmul_flops + attention_flops, recomputed)
