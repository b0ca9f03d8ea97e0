"""Estimates step time, memory and communication of a job, corrected by finished runs on this machine; torch-free."""

from __future__ import annotations

from meshwright.planner.calibration.corrections import Corrections, corrections_for
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import estimate_memory, rank_traces
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.workload.planned_job import PlannedJob


def estimate(
    job: PlannedJob,
    simulate_pipeline: bool = False,
    corrections: Corrections | None = None,
    quick: bool = False,
) -> Estimate:
    """Estimates a job.

    Args:
        job: the job.
        simulate_pipeline: compute the bubble by running the schedule pass by pass; slower than the closed form.
        corrections: finished runs that correct the estimate; default: those of this machine, if the job runs on it.
        quick: estimate the memory of those pipeline ranks only that may need most.
    """
    corrections = corrections_for(job.cluster) if corrections is None else corrections
    traces = rank_traces(job)
    memory = corrections.correct_memory(job, estimate_memory(job, quick, traces))
    return corrections.correct_estimate(estimate_step(job, memory, simulate_pipeline, traces))
