"""Converts an estimate to the JSON record that a run's report compares with measurements; torch-free."""

from __future__ import annotations

from typing import Any

from meshwright.base.topology.axes import AXES
from meshwright.planner.calibration.corrections import corrections_for
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import exposed_seconds, memory_by_class

VERSION = 1
"""Version of the record."""


def prediction_record(estimate: Estimate) -> dict[str, Any]:
    """Returns the predicted times, bytes and rates of one step.

    | key | measured as |
    |---|---|
    | seconds, low, high | `seconds` of a step record; low to high is the 80 % interval |
    | phases | exposed seconds by what they are spent on; they add up to `seconds` |
    | exposed_seconds | time spent waiting for communication; `phases.sync` of a step is the part outside the passes |
    | memory | bytes by class on the pipeline rank with the largest peak |
    | memory.tensors, memory.reserved | peak_total of the memory tracker, peak reserved memory of torch's allocator |
    | communication | the communication counter's rows by axis and collective: message bytes, calls and their product |
    | corrections | the figures that finished runs on this machine corrected: factor, spread and number of runs |
    """
    job, memory = estimate.job, estimate.peak_memory
    return {
        "version": VERSION,
        "model": job.model.name,
        "cluster": job.cluster.name,
        "device": job.cluster.device.name,
        "devices": job.layout.ranks,
        "plan": plan_record(estimate),
        "seconds": estimate.seconds,
        "low": estimate.interval_low,
        "high": estimate.interval_high,
        "main_uncertainty": estimate.main_uncertainty,
        "phases": dict(estimate.phases),
        "exposed_seconds": exposed_seconds(estimate),
        "tokens": job.tokens_per_step,
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "flops": estimate.model_flops,
        "hardware_flops": estimate.hardware_flops,
        "fits": estimate.fits,
        "memory": {
            "capacity": job.cluster.device.memory,
            "stage": memory.rank,
            **memory_by_class(memory),
            "tensors": memory.tensors,
            "reserved": memory.reserved,
            "total": memory.total,
            "total_by_stage": [rank_memory.total for rank_memory in estimate.memory_by_rank],
        },
        "communication": [
            {
                "axis": call.axis,
                "collective": call.collective,
                "message_bytes": call.message_bytes,
                "calls": call.calls,
                "bytes": call.message_bytes * call.calls,
                "ranks": call.ranks,
                "link": call.link,
                "seconds": call.seconds,
                "exposed_seconds": call.exposed_seconds,
            }
            for call in estimate.calls
        ],
        "corrections": corrections_for(job.cluster).applied(job),
        "notes": list(estimate.notes),
    }


def plan_record(estimate: Estimate) -> dict[str, Any]:
    """Returns everything that a plan decides, under the names of a run's settings."""
    job, layout = estimate.job, estimate.job.layout
    return {
        "layout": {axis: getattr(layout, axis) for axis in AXES} | {"expert": layout.expert, "sharding": job.sharding},
        "batch": {
            "global": job.batch.global_,
            "micro": job.batch.micro,
            "data_parallel": job.batch.replicas,
            "accumulation": job.batch.accumulation,
        },
        "sequence": job.sequence,
        "precision": job.precision,
        "activation_checkpoint": job.activation_checkpoint,
        "schedule": job.schedule if layout.pipeline > 1 else None,
        "stages": job.stages_per_rank if layout.pipeline > 1 else None,
        "context_method": job.context_method if layout.context > 1 else None,
        "trainer": job.trainer.name,
    }
