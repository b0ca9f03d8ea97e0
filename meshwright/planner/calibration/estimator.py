"""Estimates step time, memory and communication of a job, corrected by finished runs on this machine; torch-free."""

from __future__ import annotations

from meshwright.planner.calibration.corrections import Corrections, corrections_for
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.workload.planned_job import PlannedJob


def estimate(
    job: PlannedJob,
    has_assumptions: bool = False,
    simulate_pipeline: bool = False,
    corrections: Corrections | None = None,
) -> Estimate:
    """Estimates a job.

    Args:
        job: the job.
        has_assumptions: whether settings that matter had to be assumed; it widens the interval.
        simulate_pipeline: compute the bubble by running the schedule pass by pass; slower than the closed form.
        corrections: finished runs that correct the estimate; default: those of this machine, if the job runs on it.
    """
    corrections = corrections_for(job.cluster) if corrections is None else corrections
    memory = corrections.correct_memory(job, estimate_memory(job))
    return corrections.correct_estimate(estimate_step(job, memory, has_assumptions, simulate_pipeline))
