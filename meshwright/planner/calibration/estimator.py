"""Everything that is said of a job before it runs."""

from __future__ import annotations

from meshwright.planner.calibration.corrections import Corrections, corrections_for
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.workload.planned_job import PlannedJob


def estimate(
    job: PlannedJob, unstated: bool = False, exact: bool = False, lessons: Corrections | None = None
) -> Estimate:
    """`unstated`: whether something that matters had to be assumed of it; `exact`: what takes longer to know, too;
    `lessons`: the runs that correct it (default: those that finished on this machine, where it is this machine's).
    """
    lessons = corrections_for(job.cluster) if lessons is None else lessons
    return lessons.correct_estimate(
        estimate_step(job, lessons.correct_memory(job, estimate_memory(job)), unstated, exact)
    )
